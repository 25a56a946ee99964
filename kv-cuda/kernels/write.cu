// nvrtc: --fmad=false
// Stores new rows of K and V in their slots (kv-cpu's write.rs and write/tail.rs). Compiled without
// FMA contraction, to round like the host.
//
//   kernel        planes               blocks (any number is correct)     threads  shared bytes
//   write_plain   unquantised and      [total_new]                        128      0
//                 untransformed,
//                 without a tail
//   write_rows    without a tail       [total_new * heads * 2 / 4]        128      4 warp
//   write_tails   with a tail          [sequences * heads * 2 / 4,        128      4 warp + 4 mean
//                                       1 + new_len_max / block_size + 1]
//
// rounded up, where warp = round16(4 * dim) + 256 + round16(row_bytes), mean = round16(4 * dim),
// round16 rounds up to a multiple of 16, and dim and row_bytes are the larger of K's and V's. In
// write_rows and write_tails, a warp writes one plane of one head: of one token, or of one block
// that the step fills. Counts are read on the device: a captured graph launches blocks for the
// maximum, or fewer, which loop.
#include "encode.h"
#include "format.h"
#include "convert.h"
#include "new_token.h"
#include "transform.h"

constexpr u32 KV_WRITE_WARPS = 4;

KV_DEV bool kv_is_plain(const KvPlane& p) { return p.format <= KV_FMT_BF16 && p.transforms == 0; }

// Writes all heads of one token of an unquantised plane.
KV_DEV void kv_write_plain(const KvTensor& rows, const KvPlane& plane, const KvNew& n) {
  const u8* from = kv_token(rows, n.entry, n.start, n.token);
  u8* to = kv_block(plane, n.block) + kv_row_begin(plane, n.place, 0);
  const u64 stride = n.place.wide ? plane.wide_head_stride : plane.head_stride;
  kv_convert_heads(rows.dtype, from, plane.format, to, stride, plane.num_kv_heads, plane.head_dim, threadIdx.x,
                   blockDim.x);
}

KV_KERNEL(write_plain, KvWriteParams, 128, 1, [](const KvWriteParams& p) {
  const KvCounts& counts = *(const KvCounts*)p.plan.counts;
  for (u32 row = blockIdx.x; row < counts.total_new; row += gridDim.x) {
    const KvNew n = kv_new_token(p.plan, counts.sequences, p.k_plane, row);
    kv_write_plain(p.k, p.k_plane, n);
    kv_write_plain(p.v, p.v_plane, n);
  }
})

// Stores the values of `e` in the plane's format.
KV_DEV void kv_encode_row(const KvPlane& p, float inv_scale, bool wide, const KvEncoder& e, u8* to) {
  if (p.format <= KV_FMT_BF16) kv_store_row(p.format, to, e.x, e.dim, e.lane, 32);
  else if (wide) kv_encode_wide(e.x, e.dim, to, e.lane);
  else kv_encode_codes(p.format, p.row_bytes, p.scales_begin, inv_scale, e, to);
}

KV_KERNEL(write_rows, KvWriteParams, 128, 1, [](const KvWriteParams& p) {
  KV_DYN_SMEM(shared);
  const KvCounts& counts = *(const KvCounts*)p.plan.counts;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, heads = p.k_plane.num_kv_heads;
  const u32 dim = p.k_plane.head_dim > p.v_plane.head_dim ? p.k_plane.head_dim : p.v_plane.head_dim;
  const u32 bytes = p.k_plane.row_bytes > p.v_plane.row_bytes ? p.k_plane.row_bytes : p.v_plane.row_bytes;
  u8* own = shared + warp * (kv_round16(4 * dim) + KV_PARTS * 4 + kv_round16(bytes));
  const u64 items = (u64)counts.total_new * heads * 2;
  for (u64 item = (u64)blockIdx.x * KV_WRITE_WARPS + warp; item < items; item += (u64)gridDim.x * KV_WRITE_WARPS) {
    const bool is_v = item % 2 == 1;
    const u32 head = (u32)(item / 2 % heads);
    const KvPlane& plane = is_v ? p.v_plane : p.k_plane;
    const KvTensor& rows = is_v ? p.v : p.k;
    const KvNew n = kv_new_token(p.plan, counts.sequences, plane, (u32)(item / 2 / heads));
    const u8* from = kv_head_row(rows, n.entry, n.start, n.token, head);
    u8* to = kv_block(plane, n.block) + kv_row_begin(plane, n.place, head);
    if (kv_is_plain(plane)) {
      kv_convert_heads(rows.dtype, from, plane.format, to, plane.row_bytes, 1, plane.head_dim, lane, 32);
      continue;
    }
    const KvEncoder e = kv_encoder(own, plane.head_dim, lane);
    kv_syncwarp();  // the previous row was read
    kv_load_row(rows.dtype, from, e.x, e.dim, lane, 32);
    kv_syncwarp();
    const KvConstants constants = kv_constants(plane, head);
    if (plane.transforms) kv_transform_store(e.x, constants.mean, constants.into, e.dim, lane);
    kv_encode_row(plane, constants.inv_scale, n.place.wide, e, to);
  }
})

// Writes new tokens of one plane, sequence and head, with one warp.
struct KvTailWriter {
  const KvPlane& plane;
  const KvTensor& rows;
  const KvSequence& sequence;
  const u32* table;
  KvConstants constants;
  KvEncoder encoder;
  float* mean;
  u32 entry, head, cached;

  // Reads a row before encoding: from the input, or from the previous tail, which is read-only and
  // follows the sequence's other blocks while the step is open.
  KV_DEV void read(u32 position) const {
    const KvEncoder& e = encoder;
    kv_syncwarp();  // the previous row was read
    if (position < cached) {
      const u32 dtype = plane.format <= KV_FMT_BF16 ? plane.format : (u32)KV_F16;
      kv_load_row(dtype, place(kv_place_sealed(plane, position, sequence)), e.x, e.dim, e.lane, 32);
      kv_syncwarp();
      return;
    }
    const u8* from = kv_head_row(rows, entry, sequence.new_start, position - cached, head);
    kv_load_row(rows.dtype, from, e.x, e.dim, e.lane, 32);
    kv_syncwarp();
    if (plane.transforms) kv_transform_store(e.x, constants.mean, constants.into, e.dim, e.lane);
    if (plane.format <= KV_FMT_BF16) return;
    for (u32 i = e.lane; i < e.dim; i += 32) e.x[i] = kv_round_wide(e.x[i]);
    kv_syncwarp();
  }

  KV_DEV u8* block(u32 index) const { return kv_block(plane, table[index]); }
  KV_DEV u8* place(const KvPlace& at) const { return block(at.index) + kv_row_begin(plane, at, head); }

  KV_DEV void put_wide(u32 position) const {
    read(position);
    kv_encode_row(plane, 1.f, true, encoder, place(kv_place_in(plane, position, sequence.coded)));
  }

  // Returns whether all values of a row are finite and did not saturate.
  KV_DEV bool is_representable() const {
    u32 amax = 0;
    for (u32 i = encoder.lane; i < encoder.dim; i += 32) amax = kv_amax_bits(amax, encoder.x[i]);
    return kv_max_of<16>(amax) < kv_as_u(65504.f);
  }

  // Computes the mean of all rows that their block will ever have; each lane has its own channels.
  KV_DEV void take_mean(u32 begin, u32 end, u8* to) const {
    const KvEncoder& e = encoder;
    for (u32 i = e.lane; i < e.dim; i += 32) mean[i] = 0.f;
    u32 counted = 0;
    for (u32 position = begin; position < end && counted < 65535; position++) {
      read(position);
      if (!is_representable()) continue;
      counted++;
      for (u32 i = e.lane; i < e.dim; i += 32) mean[i] += e.x[i];
    }
    const float factor = 1.f / (float)(counted > 0 ? counted : 1);
    for (u32 i = e.lane; i < e.dim; i += 32) {
      mean[i] = kv_round_wide(mean[i] * factor);
      ((u16*)to)[i] = kv_f16_bits(mean[i]);
    }
  }

  // Encodes rows of one block, which has no others before `end`; `whole` if they start at its first
  // row.
  KV_DEV void put_codes(u32 begin, u32 end, bool whole) const {
    const KvEncoder& e = encoder;
    if (plane.block_means) {
      u8* stored = block(kv_place(plane, begin).index) + plane.mean_begin + (u64)head * e.dim * 2;
      if (whole) take_mean(begin, end, stored);
      else
        for (u32 i = e.lane; i < e.dim; i += 32) mean[i] = kv_load(KV_F16, stored, i);
    }
    for (u32 position = begin; position < end; position++) {
      read(position);
      if (plane.block_means) {
        for (u32 i = e.lane; i < e.dim; i += 32) e.x[i] -= mean[i];
        kv_syncwarp();
      }
      kv_encode_row(plane, constants.inv_scale, false, e, place(kv_place(plane, position)));
    }
  }
};

// Writes one part of a sequence. Part 0 is its rows in 16 bits, part `i` the `i`th block that gets
// codes.
KV_DEV void kv_write_tail_part(const KvTailWriter& writer, u32 part) {
  const KvPlane& plane = writer.plane;
  const KvSequence& s = writer.sequence;
  const u32 cached = writer.cached, prefix = plane.full_precision_prefix;
  const u32 tail = kv_tail_begin(plane, s.kv_len, s.coded);
  if (part == 0) {
    for (u32 position = cached; position < s.kv_len && position < prefix; position++) writer.put_wide(position);
    u32 position = tail > cached ? tail : cached;
    for (position = position > prefix ? position : prefix; position < s.kv_len; position++) writer.put_wide(position);
    return;
  }
  const u32 sealed = kv_tail_begin(plane, cached, s.coded_before);
  const u32 first = sealed > prefix ? sealed : prefix;
  if (first >= tail) return;
  const u32 index = kv_place(plane, first).index + part - 1;
  const u32 begin = part == 1 ? first : kv_tokens(plane, index);
  if (begin >= tail) return;
  const u32 next = kv_tokens(plane, index + 1), end = next < tail ? next : tail;
  // If the block already has codes, it keeps its mean.
  const u32 start = kv_tokens(plane, index);
  writer.put_codes(begin, end, begin <= (start > prefix ? start : prefix));
}

// Returns the number of parts of a sequence, or more.
KV_DEV u32 kv_tail_parts(const KvPlane& plane, const KvSequence& s, u32 cached) {
  const u32 tail = kv_tail_begin(plane, s.kv_len, s.coded);
  const u32 sealed = kv_tail_begin(plane, cached, s.coded_before);
  const u32 first = sealed > plane.full_precision_prefix ? sealed : plane.full_precision_prefix;
  if (first >= tail) return 1;
  return 2 + kv_place(plane, tail - 1).index - kv_place(plane, first).index;
}

KV_KERNEL(write_tails, KvWriteParams, 128, 1, [](const KvWriteParams& p) {
  KV_DYN_SMEM(shared);
  const KvCounts& counts = *(const KvCounts*)p.plan.counts;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, heads = p.k_plane.num_kv_heads;
  const u32 dim = p.k_plane.head_dim > p.v_plane.head_dim ? p.k_plane.head_dim : p.v_plane.head_dim;
  const u32 bytes = p.k_plane.row_bytes > p.v_plane.row_bytes ? p.k_plane.row_bytes : p.v_plane.row_bytes;
  const u32 mean_bytes = kv_round16(4 * dim);
  u8* own = shared + warp * (2 * mean_bytes + KV_PARTS * 4 + kv_round16(bytes));
  const u64 items = (u64)counts.sequences * heads * 2;
  for (u64 item = (u64)blockIdx.x * KV_WRITE_WARPS + warp; item < items; item += (u64)gridDim.x * KV_WRITE_WARPS) {
    const bool is_v = item % 2 == 1;
    const u32 head = (u32)(item / 2 % heads), entry = (u32)(item / 2 / heads);
    const KvSequence& s = ((const KvSequence*)p.plan.sequences)[entry];
    if (s.new_len == 0) continue;
    const KvPlane& plane = is_v ? p.v_plane : p.k_plane;
    const u32 cached = s.kv_len - s.new_len;
    const KvTailWriter writer = {plane,
                                 is_v ? p.v : p.k,
                                 s,
                                 (const u32*)p.plan.tables + s.table,
                                 kv_constants(plane, head),
                                 kv_encoder(own + mean_bytes, plane.head_dim, lane),
                                 (float*)own,
                                 entry,
                                 head,
                                 cached};
    const u32 parts = kv_tail_parts(plane, s, cached);
    for (u32 part = blockIdx.y; part < parts; part += gridDim.y) kv_write_tail_part(writer, part);
  }
})
