// nvrtc: --fmad=false
// Stores new rows of K and V as Lloyd-Max codes with a scale per row: write.cu's write_rows for the
// usual shapes, with the same bits.
//
//   kernel           blocks (any number is correct)         threads  shared bytes
//   write_lloyd_DIM  [total_new * heads / rows] rounded up  128      4 * rows * (DIM + 8)
//
// where rows = 2048 / DIM. K and V have `head_dim` DIM (128 or 256) and l6, l4 or l3 with a scale per
// row; no tail and no full-precision prefix. Input rows begin at multiples of 16 bytes. total_new *
// heads < 2^31.
//
// DIM / 16 lanes encode a row. They load it as KvRowLane does and exchange values through shared
// memory, because sums are taken in kv-quant's order: eight partial sums over every eighth value.
#include "encode.h"
#include "new_token.h"
#include "row_lanes.h"

// A row in which lane `lane` of it has every eighth value of four groups of 32: value `4 * g + j` is
// that at `128 * (lane / 8) + 32 * g + 8 * j + lane % 8`.
template <u32 DIM> struct KvLloydRow {
  static constexpr u32 LANES = DIM / 16, SETS = DIM / 128;
  static_assert(SETS == 1 || SETS == 2, "up to 16 lanes");

  u32 lane, warp_lane;
  float x[16];

  // Takes the values of a row through `shared`, which has DIM values.
  KV_DEV void exchange(const KvRowLane<DIM>& row, float* shared) {
    kv_syncwarp();  // the previous row was read
#pragma unroll
    for (u32 half = 0; half < 2; half++)
#pragma unroll
      for (u32 i = 0; i < 8; i += 4) {
        const float* from = row.x + half * 8 + i;
        *(KvFloat4*)(shared + KvRowLane<DIM>::first(lane, half) + i) = {from[0], from[1], from[2], from[3]};
      }
    kv_syncwarp();
#pragma unroll
    for (u32 i = 0; i < 16; i++) x[i] = shared[lane / 8 * 128 + i * 8 + lane % 8];
    kv_syncwarp();
  }

  // Continues a sum of the lanes `0..8` in the lanes `8..16` of a row, and gives the result to all.
  template <class Add> KV_DEV float in_order(Add add) const {
    float sum = add(0.f);
    if (SETS == 1) return sum;
    const float carried = kv_shflf(sum, warp_lane & ~8u);
    sum = add(lane < 8 ? 0.f : carried);
    return kv_shflf(sum, warp_lane | 8);
  }
};

template <u32 BITS> constexpr auto kv_book() {
  if constexpr (BITS == 3) return KV_BOOK3;
  else if constexpr (BITS == 4) return KV_BOOK4;
  else return KV_BOOK6;
}

// Returns 1 if value > threshold, otherwise, also for NaN, 0: the difference of two numbers from
// 2^-4 on is a multiple of 2^-28, which saturates at 1 times 2^30. An instruction of the pipe that
// also multiplies, where a comparison and a selection take twice its time.
KV_DEV float kv_is_above(float value, float threshold) {
#if defined(KV_EMU)
  return value > threshold ? 1.f : 0.f;
#else
  float above;
  asm("fma.rn.sat.f32 %0,%1,%2,%3;" : "=f"(above) : "f"(value), "f"(1073741824.f), "f"(threshold * -1073741824.f));
  return above;
#endif
}

// Differences of neighbouring levels, which add up to the levels exactly.
template <u32 N> constexpr KvLevels<N - 1> kv_steps(const KvLevels<N>& book) {
  KvLevels<N - 1> list = {};
  for (u32 i = 0; i + 1 < N; i++) list.at[i] = (float)((double)book.at[i + 1] - (double)book.at[i]);
  return list;
}
template <u32 N> constexpr bool kv_add_up(const KvLevels<N>& book) {
  for (u32 i = 0; i + 1 < N; i++)
    if ((float)((double)book.at[i] + (double)kv_steps(book).at[i]) != book.at[i + 1]) return false;
  return true;
}
static_assert(kv_add_up(KV_BOOK3) && kv_add_up(KV_BOOK4), "levels from steps");

// kv_nearest: the magnitude nearest to a value that is not negative.
template <u32 BITS> KV_DEV float kv_nearest_level(float value) {
  if constexpr (BITS == 6) {
    return kv_nearest<6>(value);
  } else {
    constexpr u32 N = 1u << (BITS - 1);
    constexpr auto book = kv_book<BITS>();
    constexpr auto thresholds = kv_thresholds(kv_book<BITS>());
    constexpr auto steps = kv_steps(kv_book<BITS>());
    float level = book.at[0];
#pragma unroll
    for (u32 i = 0; i + 1 < N; i++) level = kv_fma(kv_is_above(value, thresholds.at[i]), steps.at[i], level);
    return level;
  }
}

// kv_row_sums.
template <u32 BITS, u32 DIM>
KV_DEV void kv_lloyd_sums(const KvLloydRow<DIM>& row, float inverse, float& projection, float& energy) {
  float projected[4], own[4];
#pragma unroll
  for (u32 g = 0; g < 4; g++) {
    projected[g] = own[g] = 0.f;
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      const float value = kv_abs(row.x[g * 4 + j]), level = kv_nearest_level<BITS>(value * inverse);
      projected[g] += value * level;
      own[g] += level * level;
    }
    projected[g] = kv_sum_of_8(projected[g]);
    own[g] = kv_sum_of_8(own[g]);
  }
  auto add = [](float sum, const float (&parts)[4]) { return (((sum + parts[0]) + parts[1]) + parts[2]) + parts[3]; };
  projection = row.in_order([&](float sum) { return add(sum, projected); });
  energy = row.in_order([&](float sum) { return add(sum, own); });
}

// kv_encode_lloyd: limits the values, and returns the factor from values to levels, and the scale;
// `has_codes` is false if all codes are 0.
template <u32 BITS, u32 DIM> KV_DEV float kv_lloyd_scale(KvLloydRow<DIM>& row, u16& stored, bool& has_codes) {
  u32 bits = 0;
#pragma unroll
  for (u32 i = 0; i < 16; i++) {
    bits = kv_amax_bits(bits, row.x[i]);
    row.x[i] = kv_as_f(kv_as_u(kv_limited(row.x[i])) | (kv_as_u(row.x[i]) & 0x80000000u));
  }
  bits = kv_max_of<KvLloydRow<DIM>::LANES / 2>(bits);
  const float energy = kv_sum_of_8(row.in_order([&](float sum) {
#pragma unroll
    for (u32 i = 0; i < 16; i++) sum += row.x[i] * row.x[i];
    return sum;
  }));
  const float amax = kv_limited(kv_as_f(bits)), rms = kv_sqrt(energy / (float)DIM);
  const float near = kv_near_scale<BITS>(rms, amax);
  float inverse = 0.f, projection = 0.f, own = 0.f, score = 0.f;
  constexpr u32 TRIES = BITS == 6 ? 4 : 6;
#pragma unroll 1
  for (u32 i = 0; i < TRIES; i++) {
    float scale = near;
    if (i + 1 == TRIES) scale = projection / own;
    else if (i > 0 && BITS == 6) scale = near * (i == 1 ? 0.94f : 1.06f);
    else if (i > 0) scale = near * (i == 1 ? 0.9f : i == 2 ? 0.95f : i == 3 ? 1.05f : 1.1f);
    const float tried = 1.f / scale;
    float tried_projection, tried_own;
    kv_lloyd_sums<BITS>(row, tried, tried_projection, tried_own);
    const float tried_score = tried_projection * (tried_projection / tried_own);
    const bool is_better = i == 0 || tried_score > score;
    inverse = is_better ? tried : inverse;
    projection = is_better ? tried_projection : projection;
    own = is_better ? tried_own : own;
    score = is_better ? tried_score : score;
  }
  const float unbiased = energy / projection;
  const u16 nearest = kv_f16_bits(kv_clamp_f16(unbiased));
  const float scale = kv_f16_f(nearest);
  // If f16 could not represent the scale, other codes are nearer.
  if (!(kv_abs(scale - unbiased) <= unbiased * 0.001f)) inverse = 1.f / scale;
  const bool is_nan = bits > KV_INFINITY;
  has_codes = !is_nan && energy > 0.f && scale > 0.f;
  stored = is_nan ? KV_F16_NAN : has_codes ? nearest : (u16)0;
  return inverse;
}

// kv_pack_codes, into the bytes of a row: group by group, bit planes as docs/formats.md draws them.
template <u32 BITS, u32 DIM>
KV_DEV void kv_pack_lloyd(const KvLloydRow<DIM>& row, float inverse, bool has_codes, u8* bytes) {
  const u32 k = row.lane % 8;
#pragma unroll
  for (u32 g = 0; g < 4; g++) {
    u32 code[4];
#pragma unroll
    for (u32 j = 0; j < 4; j++) code[j] = has_codes ? kv_lloyd_code<BITS>(row.x[g * 4 + j], inverse) : 0;
    u8* group = bytes + (row.lane / 8 * 4 + g) * kv_group_bytes(BITS);
    if (BITS == 3) {
      group[k] = (u8)((code[0] & 3) | (code[1] & 3) << 2 | (code[2] & 3) << 4 | (code[3] & 3) << 6);
      const u32 signs = (code[0] >> 2) | (code[1] >> 2) << 2 | (code[2] >> 2) << 4 | (code[3] >> 2) << 6;
      const u32 others = kv_shfl_xor(signs, 4);
      if (k < 4) group[8 + k] = (u8)(signs | others << 1);
    } else {
      group[k] = (u8)((code[0] & 15) | (code[2] & 15) << 4);
      group[k + 8] = (u8)((code[1] & 15) | (code[3] & 15) << 4);
      if (BITS == 6) group[16 + k] = (u8)(code[0] >> 4 | code[1] >> 4 << 2 | code[2] >> 4 << 4 | code[3] >> 4 << 6);
    }
  }
}

template <u32 BITS, u32 DIM>
KV_DEV void kv_store_lloyd(KvLloydRow<DIM>& row, u8* to, u8* staged, bool exists) {
  constexpr u32 BYTES = DIM / KV_GROUP * kv_group_bytes(BITS);
  u16 scale;
  bool has_codes;
  const float inverse = kv_lloyd_scale<BITS>(row, scale, has_codes);
  u8* own = staged + ((u32)(u64)to & 15);
  kv_pack_lloyd<BITS>(row, inverse, has_codes, own);
  if (row.lane == 0) *(u16*)(own + BYTES) = scale;
  kv_syncwarp();
  if (exists) kv_store_staged<KvLloydRow<DIM>::LANES>(to, own, BYTES + 2, row.lane);
}

template <u32 DIM> KV_DEV void kv_write_lloyd(const KvWriteParams& p) {
  typedef KvRowLane<DIM> Row;
  constexpr u32 WARPS = 4;
  KV_DYN_SMEM(shared);
  const KvCounts& counts = *(const KvCounts*)p.plan.counts;
  const u32 lane = threadIdx.x % Row::LANES, heads = p.k_plane.num_kv_heads, items = counts.total_new * heads;
  const u32 nth = threadIdx.x % 32 / Row::LANES, warp = threadIdx.x / 32;
  // Values of the rows of a warp begin in different banks.
  float* values = (float*)shared + (warp * Row::ROWS + nth) * (DIM + 8);
  for (u32 first = (blockIdx.x * WARPS + warp) * Row::ROWS; first < items; first += gridDim.x * WARPS * Row::ROWS) {
    const bool exists = first + nth < items;
    const u32 item = exists ? first + nth : items - 1, token = item / heads, head = item - token * heads;
    const KvNew n = kv_new_token(p.plan, counts.sequences, p.k_plane, token);
#pragma unroll 1
    for (u32 is_v = 0; is_v < 2; is_v++) {
      const KvPlane& plane = is_v != 0 ? p.v_plane : p.k_plane;
      const KvTensor& rows = is_v != 0 ? p.v : p.k;
      u8* to = kv_block(plane, n.block) + kv_row_begin(plane, n.place, head);
      Row row;
      row.lane = lane;
      row.convert(rows.dtype, Row::read(rows.dtype, kv_head_row(rows, n.entry, n.start, n.token, head), lane));
      if (plane.transforms) {
        const KvConstants constants = kv_constants(plane, head);
        row.transform_store(constants.mean, constants.into);
      }
      KvLloydRow<DIM> lloyd;
      lloyd.lane = lane;
      lloyd.warp_lane = threadIdx.x % 32;
      lloyd.exchange(row, values);
      if (plane.format == KV_FMT_L6) kv_store_lloyd<6>(lloyd, to, (u8*)values, exists);
      else if (plane.format == KV_FMT_L4) kv_store_lloyd<4>(lloyd, to, (u8*)values, exists);
      else kv_store_lloyd<3>(lloyd, to, (u8*)values, exists);
    }
  }
}

KV_KERNEL(write_lloyd_128, KvWriteParams, 128, 4, [](const KvWriteParams& p) { kv_write_lloyd<128>(p); })
KV_KERNEL(write_lloyd_256, KvWriteParams, 128, 4, [](const KvWriteParams& p) { kv_write_lloyd<256>(p); })
