// The epilogue: merges the results of warps and of KV splits, and writes output rows. Part of
// decode.h.
#pragma once

constexpr u32 kv_decode_stride(u32 dim) { return dim + 4; }  // padded row of a warp's results
constexpr u32 KV_DECODE_MERGE_SPLITS = 16;                   // KV splits whose weights a warp holds at a time

// Rows between partial results: those of the largest query tile.
KV_DEV u32 kv_decode_partial_rows(const KvAttendParams& p) {
  if (p.q_len_max >= KV_DECODE_ROWS || p.group >= KV_DECODE_ROWS) return KV_DECODE_ROWS;
  const u32 rows = p.q_len_max * p.group;
  return rows < KV_DECODE_ROWS ? rows : KV_DECODE_ROWS;
}

// The softmax state of a row: the sum of weights relative to 2^max.
struct KvDecodeTotal { float max, sum; };

KV_DEV void kv_decode_add(float4& to, float weight, float4 x) {
  to.x += weight * x.x, to.y += weight * x.y, to.z += weight * x.z, to.w += weight * x.w;
}

// Results of the warps of a thread block, in shared memory.
template <class F, int DIM> struct KvDecodeShared {
  static constexpr u32 WARPS = KvDecodeRing<F, DIM>::WARPS, STRIDE = kv_decode_stride(DIM);

  float* values;       // [WARPS][16][STRIDE]
  float *maxs, *sums;  // [WARPS][16]
  u32* flag;
  float* weights;      // [WARPS][KV_DECODE_MERGE_SPLITS][16]: weights of KV splits

  KV_DEV explicit KvDecodeShared(u8* memory) {
    values = (float*)memory;
    maxs = values + WARPS * KV_DECODE_ROWS * STRIDE;
    sums = maxs + WARPS * KV_DECODE_ROWS;
    flag = (u32*)(sums + WARPS * KV_DECODE_ROWS);
    weights = (float*)(flag + 4);
  }
  KV_DEV float* at(u32 warp, u32 row, u32 column) const {
    return values + (warp * KV_DECODE_ROWS + row) * STRIDE + column;
  }
  KV_DEV void put(u32 warp, u32 row, KvDecodeTotal total) const {
    maxs[warp * KV_DECODE_ROWS + row] = total.max;
    sums[warp * KV_DECODE_ROWS + row] = total.sum;
  }
  // Computes the total of a row, and the factor that rescales each warp's values.
  KV_DEV KvDecodeTotal total(u32 row, float (&factors)[WARPS]) const {
    KvDecodeTotal total = {kv_minus_inf(), 0.f};
#pragma unroll
    for (u32 warp = 0; warp < WARPS; warp++) total.max = kv_max(total.max, maxs[warp * KV_DECODE_ROWS + row]);
    const float from = total.max == kv_minus_inf() ? 0.f : total.max;
#pragma unroll
    for (u32 warp = 0; warp < WARPS; warp++) {
      factors[warp] = kv_exp2(maxs[warp * KV_DECODE_ROWS + row] - from);
      total.sum += factors[warp] * sums[warp * KV_DECODE_ROWS + row];
    }
    return total;
  }
};

// Returns the factor that normalises a row, and its log-sum-exp, including the sink logit of its
// head.
KV_DEV float kv_decode_normalise(const KvDecodeWork& w, u32 head, KvDecodeTotal total, float& lse) {
  const float minus_inf = kv_minus_inf();
  const float sink = w.p.attend.sink_logits == 0 ? minus_inf : ((const float*)w.p.attend.sink_logits)[head] * KV_LOG2_E;
  const float max = kv_max(total.max, sink);
  if (max == minus_inf) {  // no key is visible, or no score is a number
    lse = total.sum == 0.f ? minus_inf : kv_as_f(0x7fc00000u);
    return total.sum == 0.f ? 0.f : kv_as_f(0x7fc00000u);
  }
  const float shrink = total.max == max ? 1.f : kv_exp2(total.max - max);
  const float sum = total.sum * shrink + (sink == minus_inf ? 0.f : kv_exp2(sink - max));
  lse = (max + kv_log2(sum)) * KV_LN_2;
  return total.sum == 0.f ? 0.f : shrink / sum;
}

// Packs two values in the output's type.
KV_DEV u32 kv_decode_pair(const KvTensor& out, float x, float y) {
  return out.dtype == KV_F16 ? kv_pack(KvF16(), x, y) : kv_pack(KvBf16(), x, y);
}

// Writes columns `column` and `column + 1` of a row, and the row's log-sum-exp with column 0. Rows
// with scales are staged in `values` for kv_decode_write_staged.
template <class F, int DIM>
KV_DEV void kv_decode_write(const KvDecodeWork& w, u32 row, u32 column, KvDecodeTotal total, float x, float y,
                            float* values) {
  const KvAttendParams& a = w.p.attend;
  const u32 query = (w.item.row + row) / a.group, head = w.item.head * a.group + (w.item.row + row) % a.group;
  float lse;
  float norm = kv_decode_normalise(w, head, total, lse);
  if constexpr (F::SCALED) {
    float* const to = values + row * kv_decode_stride(DIM) + column;
    to[0] = norm == 0.f ? 0.f : x * norm;
    to[1] = norm == 0.f ? 0.f : y * norm;
  } else {
    u32* out = (u32*)(kv_head_row(a.out, w.item.sequence, w.sequence.q_start, query, head) + column * 2);
    if (norm == 0.f) {
      *out = 0;
    } else {
      if (F::CODES) norm *= kv_constants(a.v_plane, w.item.head).scale;
      *out = kv_decode_pair(a.out, x * norm, y * norm);
    }
  }
  if (column == 0 && a.lse.data != 0) {
    *(float*)kv_head_row(a.lse, w.item.sequence, w.sequence.q_start, query, head) = lse;
  }
}

// Writes rows that are staged in shared memory, after the inverse transform if V is transformed.
template <class F, int DIM> KV_DEV void kv_decode_write_staged(const KvDecodeWork& w, float* values) {
  const KvAttendParams& a = w.p.attend;
  kv_sync();
  for (u32 row = w.warp; row < w.rows; row += KvDecodeRing<F, DIM>::WARPS) {
    float* const from = values + row * kv_decode_stride(DIM);
    if (a.v_plane.transforms != 0) {
      kv_transform_output(from, kv_constants(a.v_plane, w.item.head).back, DIM, w.lane);
    }
    const u32 query = (w.item.row + row) / a.group, head = w.item.head * a.group + (w.item.row + row) % a.group;
    u32* const to = (u32*)kv_head_row(a.out, w.item.sequence, w.sequence.q_start, query, head);
    for (u32 i = w.lane; i < DIM / 2; i += 32) to[i] = kv_decode_pair(a.out, from[i * 2], from[i * 2 + 1]);
  }
}

#include "decode_split_merge.h"

// Sums the warps' results of each row and writes the output.
template <class F, int DIM>
KV_DEV void kv_decode_write_rows(const KvDecodeWork& w, const KvDecodeShared<F, DIM>& shared) {
  constexpr u32 WARPS = KvDecodeShared<F, DIM>::WARPS;
  for (u32 i = w.warp * 32 + w.lane; i < w.rows * (DIM / 2); i += WARPS * 32) {
    const u32 row = i / (DIM / 2), column = i % (DIM / 2) * 2;
    float weights[WARPS], x = 0.f, y = 0.f;
    const KvDecodeTotal total = shared.total(row, weights);
#pragma unroll
    for (u32 warp = 0; warp < WARPS; warp++) {
      const float2 pair = *(const float2*)shared.at(warp, row, column);
      x += weights[warp] * pair.x;
      y += weights[warp] * pair.y;
    }
    kv_decode_write<F, DIM>(w, row, column, total, x, y, shared.values);  // no other thread reads this place
  }
  if constexpr (F::SCALED) kv_decode_write_staged<F, DIM>(w, shared.values);
}

// Writes a partial result: rows divided by their sums, and log2 of the sums.
template <class F, int DIM>
KV_DEV void kv_decode_write_partial(const KvDecodeWork& w, const KvDecodeShared<F, DIM>& shared) {
  constexpr u32 WARPS = KvDecodeShared<F, DIM>::WARPS;
  const u64 partial = (u64)(w.item.partial + w.item.split) * kv_decode_partial_rows(w.p.attend);
  for (u32 i = w.warp * 32 + w.lane; i < w.rows * (DIM / 4); i += WARPS * 32) {
    const u32 row = i / (DIM / 4), column = i % (DIM / 4) * 4;
    float weights[WARPS];
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    const KvDecodeTotal total = shared.total(row, weights);
    const float norm = total.sum == 0.f ? 0.f : 1.f / total.sum;
#pragma unroll
    for (u32 warp = 0; warp < WARPS; warp++) {
      kv_decode_add(sum, weights[warp], *(const float4*)shared.at(warp, row, column));
    }
    float4* const to = (float4*)((float*)w.p.attend.partial_rows + (partial + row) * DIM + column);
    *to = make_float4(sum.x * norm, sum.y * norm, sum.z * norm, sum.w * norm);
    if (column == 0) {
      const float from = total.max == kv_minus_inf() ? 0.f : total.max;
      ((float*)w.p.attend.partial_stats)[partial + row] = total.sum == 0.f ? kv_minus_inf() : from + kv_log2(total.sum);
    }
  }
}

// Merges the warps in order. If the query tile is not split, its rows are written; otherwise a
// partial result is, and the last work item to finish merges all of them.
template <class F, int DIM>
KV_DEV void kv_decode_merge(const KvDecodeWork& w, KvDecodeRows& rows, const float (&o)[DIM / 8][4], u8* memory) {
  const KvDecodeShared<F, DIM> shared(memory);
  const u32 g = w.lane >> 2, t = w.lane & 3;
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    rows.sum[h] += kv_shfl_xorf(rows.sum[h], 1);
    rows.sum[h] += kv_shfl_xorf(rows.sum[h], 2);
    const u32 row = g + h * 8;
    [[maybe_unused]] float level = 1.f;
    if constexpr (F::SCALED) {  // the sum becomes 1 to 2, so that its logarithm is as exact as it can be
      const u32 exponent = kv_as_u(rows.sum[h]) >> 23;
      level = F::LEVEL_SCALE;
      if (exponent > 0 && exponent < 254) {
        const float shrink = kv_as_f((254 - exponent) << 23);
        rows.sum[h] *= shrink;
        rows.max[h] += (float)(int)(exponent - 127);
        level *= shrink;
      }
    }
    if (t == 0) shared.put(w.warp, row, {rows.max[h], rows.sum[h]});
#pragma unroll
    for (u32 d = 0; d < DIM / 8; d++)
#pragma unroll
      for (u32 j = 0; j < 2; j++) {
        float x = o[d][h * 2 + j];
        if constexpr (F::SCALED) x *= level;
        *shared.at(w.warp, row, F::template column<DIM>(d, j, t)) = x;
      }
  }
  kv_sync();
  if (w.item.num_splits > 1) {
    kv_decode_write_partial<F, DIM>(w, shared);
    kv_fence();
    kv_sync();
    if (threadIdx.x == 0) {
      *shared.flag = kv_atomic_inc((u32*)w.p.attend.counters + w.item.partial, w.item.num_splits - 1);
    }
#ifndef KV_BUG_FLAG
    kv_sync();
#endif
    if (*shared.flag != w.item.num_splits - 1) return;
    kv_fence();
    kv_decode_merge_splits<F, DIM>(w, shared);
    kv_sync();
  }
  kv_decode_write_rows<F, DIM>(w, shared);
}
