// nvrtc: --fmad=false
// Decodes stored rows to unquantised rows: gather.cu's gather_rows for the usual shapes, with the
// same bits.
//
//   kernel             rows that it reads                  blocks (any number    threads  shared
//                                                          is correct)                    bytes
//   gather_plain_DIM   unquantised and untransformed       [total * heads / n]   128      0
//   gather_values_DIM  all others                          [total * heads / n]   128      0
//
// rounded up, where n = 2048 / DIM. The plane has `head_dim` DIM (64, 128 or 256), no tail, no
// full-precision prefix and no block means. Output rows, and stored rows in 16 or 32 bits, begin at
// multiples of 16 bytes. total * heads < 2^31.
//
// DIM / 16 lanes read a row, 16 values each. Plain rows need few registers, so that more warps hide
// the latency of memory.
#include "format.h"
#include "row_lanes.h"

// Decodes a lane's codes of a row at an even address.
template <u32 DIM> KV_DEV void kv_decode_codes(u32 format, const u8* row, float factor, KvRowLane<DIM>& out) {
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    const KvBytes8 codes = kv_bytes8(row + KvRowLane<DIM>::first(out.lane, half));
#pragma unroll
    for (u32 w = 0; w < 2; w++) {
      float* x = out.x + half * 8 + w * 4;
      const u32 four = codes.word[w];
      if (format >= KV_FMT_INT8_ROW) {
        u32 low, high;
        kv_int8x4_f16x2(four, low, high);
        x[0] = kv_f16_f((u16)low), x[1] = kv_f16_f((u16)(low >> 16));
        x[2] = kv_f16_f((u16)high), x[3] = kv_f16_f((u16)(high >> 16));
      } else if (format >= KV_FMT_E5M2) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) x[i] = kv_e5m2_decode(four >> (i * 8) & 0xff);
      } else {
        const u32 low = kv_e4m3x2_f16x2(four), high = kv_e4m3x2_f16x2(four >> 16);
        x[0] = kv_f16_f((u16)low), x[1] = kv_f16_f((u16)(low >> 16));
        x[2] = kv_f16_f((u16)high), x[3] = kv_f16_f((u16)(high >> 16));
      }
    }
  }
#pragma unroll
  for (u32 i = 0; i < 16; i++) out.x[i] *= factor;
}

// Decodes a lane's codes of another format.
template <u32 DIM>
KV_DEV void kv_decode_others(const KvPlane& p, const u8* row, float scale, float factor, KvRowLane<DIM>& out) {
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    float levels[8];
    kv_run<8>(p.format, row, p.scales_begin, scale, KvRowLane<DIM>::first(out.lane, half), levels);
#pragma unroll
    for (u32 i = 0; i < 8; i++) out.x[half * 8 + i] = levels[i] * factor;
  }
}

// Calls `read(from, to, head, exists)` for every row, with all lanes of a warp.
template <u32 DIM, class Read> KV_DEV void kv_for_rows(const KvGatherParams& p, Read read) {
  typedef KvRowLane<DIM> Row;
  constexpr u32 WARPS = 4;
  const KvPlane& plane = p.plane;
  const KvRange* ranges = (const KvRange*)p.ranges;
  const u32 nth = threadIdx.x % 32 / Row::LANES, warp = threadIdx.x / 32;
  const u32 heads = plane.num_kv_heads, items = p.total * heads;
  for (u32 first = (blockIdx.x * WARPS + warp) * Row::ROWS; first < items; first += gridDim.x * WARPS * Row::ROWS) {
    const bool exists = first + nth < items;
    const u32 item = exists ? first + nth : items - 1, token = item / heads, head = item - token * heads;
    const u32 entry = kv_entry_of(p.num_ranges, token, [=](u32 i) { return ranges[i].start; });
    const KvRange& range = ranges[entry];
    const u32 position = range.begin + (token - range.start);
    const u32 block = ((const u32*)p.tables)[(u64)range.table + position / plane.block_size];
    const u8* from = kv_block(plane, block) + kv_row_begin(plane, {0, position % plane.block_size, false}, head);
    read(from, kv_head_row(p.out, entry, range.start, token - range.start, head), head, exists);
  }
}

template <u32 DIM> KV_DEV void kv_gather_plain(const KvGatherParams& p) {
  const u32 lane = threadIdx.x % KvRowLane<DIM>::LANES;
  kv_for_rows<DIM>(p, [&](const u8* from, u8* to, u32, bool exists) {
    const KvRawLane raw = KvRowLane<DIM>::read(p.plane.format, from, lane);
    if (!exists) return;
    if (p.plane.format == p.out.dtype) return KvRowLane<DIM>::copy(p.out.dtype, raw, to, lane);
    KvRowLane<DIM> row;
    row.lane = lane;
    row.convert(p.plane.format, raw);
    row.write(p.out.dtype, to);
  });
}

template <u32 DIM> KV_DEV void kv_gather_values(const KvGatherParams& p) {
  const KvPlane& plane = p.plane;
  kv_for_rows<DIM>(p, [&](const u8* from, u8* to, u32 head, bool exists) {
    KvRowLane<DIM> row;
    row.lane = threadIdx.x % KvRowLane<DIM>::LANES;
    const KvConstants constants = kv_constants(plane, head);
    const float factor = kv_factor(plane.format, from, plane.scales_begin, constants.scale);
    if (plane.format <= KV_FMT_BF16) row.convert(plane.format, KvRowLane<DIM>::read(plane.format, from, row.lane));
    else if (plane.format <= KV_FMT_INT8_HEAD) kv_decode_codes<DIM>(plane.format, from, factor, row);
    else kv_decode_others<DIM>(plane, from, constants.scale, factor, row);
    if (plane.transforms) row.transform_load(constants.mean, constants.back);
    if (exists) row.write(p.out.dtype, to);
  });
}

KV_KERNEL(gather_plain_64, KvGatherParams, 128, 10, [](const KvGatherParams& p) { kv_gather_plain<64>(p); })
KV_KERNEL(gather_plain_128, KvGatherParams, 128, 10, [](const KvGatherParams& p) { kv_gather_plain<128>(p); })
KV_KERNEL(gather_plain_256, KvGatherParams, 128, 10, [](const KvGatherParams& p) { kv_gather_plain<256>(p); })
KV_KERNEL(gather_values_64, KvGatherParams, 128, 7, [](const KvGatherParams& p) { kv_gather_values<64>(p); })
KV_KERNEL(gather_values_128, KvGatherParams, 128, 7, [](const KvGatherParams& p) { kv_gather_values<128>(p); })
KV_KERNEL(gather_values_256, KvGatherParams, 128, 7, [](const KvGatherParams& p) { kv_gather_values<256>(p); })
