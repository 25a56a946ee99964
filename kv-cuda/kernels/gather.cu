// nvrtc: --fmad=false
// gather_rows: decodes stored rows to unquantised rows (kv-cpu's gather.rs). Needs `--fmad=false`,
// to round like the host.
//
//   kernel        blocks (any number is correct)          threads  shared bytes
//   gather_rows   [total * num_kv_heads / 4] rounded up   128      4 * round16(4 * head_dim); 0 for
//                                                                  unquantised, untransformed rows
//
// A warp reads one row of one head. Rows of `out` that belong to no range are filled by pad_rows.
#include "format.h"
#include "convert.h"
#include "transform.h"

constexpr u32 KV_GATHER_WARPS = 4;

// Decodes a row of codes into memory that the warp shares.
KV_DEV void kv_decode_row(const KvPlane& p, const u8* row, float scale, float* x, u32 lane) {
  for (u32 begin = lane * 8; begin < p.head_dim; begin += 32 * 8) {
    float values[8];
    kv_values<8>(p.format, row, p.scales_begin, p.head_dim, scale, begin, values);
#pragma unroll
    for (u32 i = 0; i < 8; i++)
      if (begin + i < p.head_dim) x[begin + i] = values[i];
  }
}

KV_KERNEL(gather_rows, KvGatherParams, 128, 1, [](const KvGatherParams& p) {
  KV_DYN_SMEM(shared);
  const KvPlane& plane = p.plane;
  const KvRange* ranges = (const KvRange*)p.ranges;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, heads = plane.num_kv_heads, dim = plane.head_dim;
  float* x = (float*)(shared + warp * ((4 * dim + 15) / 16 * 16));
  const bool plain = plane.format <= KV_FMT_BF16;
  const u64 items = (u64)p.total * heads;
  for (u64 item = (u64)blockIdx.x * KV_GATHER_WARPS + warp; item < items; item += (u64)gridDim.x * KV_GATHER_WARPS) {
    const u32 row = (u32)(item / heads), head = (u32)(item % heads);
    const u32 entry = kv_entry_of(p.num_ranges, row, [=](u32 i) { return ranges[i].start; });
    const KvRange& range = ranges[entry];
    const u32 token = row - range.start;
    const KvPlace place = kv_place_in(plane, range.begin + token, range.coded);
    const u8* block = kv_block(plane, ((const u32*)p.tables)[(u64)range.table + place.index]);
    const u8* from = block + kv_row_begin(plane, place, head);
    u8* to = kv_head_row(p.out, entry, range.start, token, head);
    if (plain && !plane.transforms) {
      kv_convert_heads(plane.format, from, p.out.dtype, to, (u64)dim * kv_dtype_bytes(p.out.dtype), 1, dim, lane, 32);
      continue;
    }
    const KvConstants constants = kv_constants(plane, head);
    kv_syncwarp();  // the previous row was read
    if (plain || place.wide) kv_load_row(plain ? plane.format : (u32)KV_F16, from, x, dim, lane, 32);
    else kv_decode_row(plane, from, constants.scale, x, lane);
    kv_syncwarp();
    if (plane.block_means && !place.wide) {
      const u8* mean = block + plane.mean_begin + (u64)head * dim * 2;
      for (u32 i = lane; i < dim; i += 32) x[i] += kv_load(KV_F16, mean, i);
      kv_syncwarp();
    }
    if (plane.transforms) kv_transform_load(x, constants.mean, constants.back, dim, lane);
    kv_store_row(p.out.dtype, to, x, dim, lane, 32);
  }
})
