// The split-K merge: the last work item of a query tile merges the partial results of its KV
// splits. Part of decode.h.
//
// The warps take splits round-robin and merge their own, as if splits were tiles; output rows are
// then written from the warps' results, as for a query tile that is not split. The order of
// additions depends only on the number of splits.
#pragma once

// Splits `warp`, `warp + WARPS`, .. of one warp.
template <class F, int DIM> struct KvDecodeSplitMerge {
  static constexpr u32 WARPS = KvDecodeShared<F, DIM>::WARPS, QUADS = DIM / 4;
  // Vectors of 4 values that a lane accumulates at a time, and so its loads in flight per split.
  // Long rows leave fewer registers. Then the number of splits that are unrolled together.
  static constexpr u32 VECTORS = F::CODES && DIM > 192 ? 1 : DIM >= 192 ? 4 : 8;
  static constexpr int UNROLL = VECTORS == 1 ? 4 : 2;
  static constexpr u32 STATS = KV_DECODE_MERGE_SPLITS / 2;  // splits whose log2 sum of one row a lane reads at a time

  const float* stats;
  const float4* values;
  float* weights;  // [KV_DECODE_MERGE_SPLITS][16]
  u32 lane, warp, row, rows, own, pitch;  // pitch: rows between partial results

  // Reads the log2 sums of this lane's row, for every other split from `begin` on, all at once;
  // minus infinity past the last split or query.
  KV_DEV void read(u32 begin, float (&x)[STATS]) const {
#pragma unroll
    for (u32 i = 0; i < STATS; i++) {
      const u32 nth = begin + i * 2 + lane / KV_DECODE_ROWS;
      x[i] = kv_minus_inf();
      if (nth < own && row < rows) x[i] = kv_ldcg(stats + (u64)(warp + nth * WARPS) * pitch + row);
    }
  }
  // Adds weighted rows of splits `begin` to `end` to those in shared memory; initialises them if
  // `begin` is 0.
  KV_DEV void add(const KvDecodeShared<F, DIM>& shared, u32 begin, u32 end) const {
    const u32 quads = rows * QUADS;
    for (u32 first = lane; first < quads; first += VECTORS * 32) {
      float4 sum[VECTORS];
#pragma unroll
      for (u32 j = 0; j < VECTORS; j++) {
        const u32 quad = first + j * 32;
        sum[j] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (begin > 0 && quad < quads) sum[j] = *(const float4*)shared.at(warp, quad / QUADS, quad % QUADS * 4);
      }
#pragma unroll UNROLL
      for (u32 nth = begin; nth < end; nth++) {
        const float4* const from = values + (u64)(warp + nth * WARPS) * (pitch * QUADS);
        const float* const own = weights + (nth - begin) * KV_DECODE_ROWS;
        float4 x[VECTORS];
#pragma unroll
        for (u32 j = 0; j < VECTORS; j++) if (first + j * 32 < quads) x[j] = kv_ldcg(from + first + j * 32);
#pragma unroll
        for (u32 j = 0; j < VECTORS; j++) {
          if (first + j * 32 < quads) kv_decode_add(sum[j], own[(first + j * 32) / QUADS], x[j]);
        }
      }
#pragma unroll
      for (u32 j = 0; j < VECTORS; j++) {
        const u32 quad = first + j * 32;
        if (quad < quads) *(float4*)shared.at(warp, quad / QUADS, quad % QUADS * 4) = sum[j];
      }
    }
  }
};

// Merges the splits of each warp, in order.
template <class F, int DIM>
KV_DEV void kv_decode_merge_splits(const KvDecodeWork& w, const KvDecodeShared<F, DIM>& shared) {
  typedef KvDecodeSplitMerge<F, DIM> Merge;
  const u32 pitch = kv_decode_partial_rows(w.p.attend);
  const u64 first_partial = w.item.partial * (u64)pitch;
  const u32 own = (w.item.num_splits + Merge::WARPS - 1 - w.warp) / Merge::WARPS, row = w.lane % KV_DECODE_ROWS;
  const Merge merge = {(const float*)w.p.attend.partial_stats + first_partial,
                     (const float4*)((const float*)w.p.attend.partial_rows + first_partial * DIM),
                     shared.weights + w.warp * (KV_DECODE_MERGE_SPLITS * KV_DECODE_ROWS),
                     w.lane, w.warp, row, w.rows, own, pitch};
  KvDecodeTotal total = {kv_minus_inf(), 0.f};
  float first[Merge::STATS], x[Merge::STATS];  // those of the first splits are kept for their weights
  merge.read(0, first);
#pragma unroll
  for (u32 i = 0; i < Merge::STATS; i++) total.max = kv_max(total.max, first[i]);
#pragma unroll 1
  for (u32 begin = KV_DECODE_MERGE_SPLITS; begin < own; begin += KV_DECODE_MERGE_SPLITS) {
    merge.read(begin, x);
#pragma unroll
    for (u32 i = 0; i < Merge::STATS; i++) total.max = kv_max(total.max, x[i]);
  }
  total.max = kv_max(total.max, kv_shfl_xorf(total.max, KV_DECODE_ROWS));
  const float from = total.max == kv_minus_inf() ? 0.f : total.max;
#pragma unroll 1
  for (u32 begin = 0; begin == 0 || begin < own; begin += KV_DECODE_MERGE_SPLITS) {
    if (begin > 0) merge.read(begin, first);
#pragma unroll
    for (u32 i = 0; i < Merge::STATS; i++) {
      const float weight = kv_exp2(first[i] - from);
      merge.weights[(i * 2 + w.lane / KV_DECODE_ROWS) * KV_DECODE_ROWS + row] = weight;
      total.sum += weight;
    }
    kv_syncwarp();  // all weights are written
    merge.add(shared, begin, own - begin < KV_DECODE_MERGE_SPLITS ? own : begin + KV_DECODE_MERGE_SPLITS);
    kv_syncwarp();  // and all are read
  }
  total.sum += kv_shfl_xorf(total.sum, KV_DECODE_ROWS);
  if (w.lane < KV_DECODE_ROWS) shared.put(w.warp, row, total);
}
