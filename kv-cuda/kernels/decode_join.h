// How the results of parts are added up by the last of them. Part of decode.h.
//
// Parts are dealt to the warps, each of which adds up its own as if they were tiles; then rows are written from what
// the warps have, as those of a piece that is the whole of its rows. What is added up in which order depends on the
// number of parts alone.
#pragma once

// The parts of one warp: `warp`, `warp + WARPS` and so on.
template <class F, int DIM> struct KvDecodeJoin {
  static constexpr u32 WARPS = KvDecodeShared<F, DIM>::WARPS, QUADS = DIM / 4;
  // Of 4 values that a lane adds up at a time: the loads of a part in flight. Long rows leave fewer registers. And the
  // parts that are taken together.
  static constexpr u32 HELD = F::CODES && DIM > 192 ? 1 : DIM >= 192 ? 4 : 8;
  static constexpr int TOGETHER = HELD == 1 ? 4 : 2;
  static constexpr u32 KNOWN = KV_DECODE_JOIN_PARTS / 2;  // parts whose logarithm of one row a lane reads at a time

  const float* stats;
  const float4* values;
  float* weights;  // [KV_DECODE_JOIN_PARTS][16]
  u32 lane, warp, row, rows, own;

  // Of the row that this lane knows, of every other part from `begin` on, all of them at once; none where there is no
  // part or no query.
  KV_DEV void read(u32 begin, float (&x)[KNOWN]) const {
#pragma unroll
    for (u32 i = 0; i < KNOWN; i++) {
      const u32 nth = begin + i * 2 + lane / KV_DECODE_ROWS;
      x[i] = kv_decode_none();
      if (nth < own && row < rows) x[i] = kv_ldcg(stats + (u64)(warp + nth * WARPS) * KV_DECODE_ROWS + row);
    }
  }
  // Adds weighted rows of parts `begin` to `end` to those in shared memory, or puts them there first.
  KV_DEV void add(const KvDecodeShared<F, DIM>& shared, u32 begin, u32 end) const {
    const u32 quads = rows * QUADS;
    for (u32 first = lane; first < quads; first += HELD * 32) {
      float4 sum[HELD];
#pragma unroll
      for (u32 j = 0; j < HELD; j++) {
        const u32 quad = first + j * 32;
        sum[j] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (begin > 0 && quad < quads) sum[j] = *(const float4*)shared.at(warp, quad / QUADS, quad % QUADS * 4);
      }
#pragma unroll TOGETHER
      for (u32 nth = begin; nth < end; nth++) {
        const float4* const from = values + (u64)(warp + nth * WARPS) * (KV_DECODE_ROWS * QUADS);
        const float* const own = weights + (nth - begin) * KV_DECODE_ROWS;
        float4 x[HELD];
#pragma unroll
        for (u32 j = 0; j < HELD; j++) if (first + j * 32 < quads) x[j] = kv_ldcg(from + first + j * 32);
#pragma unroll
        for (u32 j = 0; j < HELD; j++) {
          if (first + j * 32 < quads) kv_decode_add(sum[j], own[(first + j * 32) / QUADS], x[j]);
        }
      }
#pragma unroll
      for (u32 j = 0; j < HELD; j++) {
        const u32 quad = first + j * 32;
        if (quad < quads) *(float4*)shared.at(warp, quad / QUADS, quad % QUADS * 4) = sum[j];
      }
    }
  }
};

// Adds up the parts of each warp, in their order.
template <class F, int DIM> KV_DEV void kv_decode_join(const KvDecodeWork& w, const KvDecodeShared<F, DIM>& shared) {
  typedef KvDecodeJoin<F, DIM> Join;
  const u64 partial = w.piece.partial * (u64)KV_DECODE_ROWS;
  const u32 own = (w.piece.parts + Join::WARPS - 1 - w.warp) / Join::WARPS, row = w.lane % KV_DECODE_ROWS;
  const Join join = {(const float*)w.p.attend.part_stats + partial,
                     (const float4*)((const float*)w.p.attend.part_rows + partial * DIM),
                     shared.weights + w.warp * (KV_DECODE_JOIN_PARTS * KV_DECODE_ROWS),
                     w.lane, w.warp, row, w.rows, own};
  KvDecodeTotal total = {kv_decode_none(), 0.f};
  float first[Join::KNOWN], x[Join::KNOWN];  // those of the first parts stay for their weights
  join.read(0, first);
#pragma unroll
  for (u32 i = 0; i < Join::KNOWN; i++) total.max = kv_max(total.max, first[i]);
#pragma unroll 1
  for (u32 begin = KV_DECODE_JOIN_PARTS; begin < own; begin += KV_DECODE_JOIN_PARTS) {
    join.read(begin, x);
#pragma unroll
    for (u32 i = 0; i < Join::KNOWN; i++) total.max = kv_max(total.max, x[i]);
  }
  total.max = kv_max(total.max, kv_shfl_xorf(total.max, KV_DECODE_ROWS));
  const float from = total.max == kv_decode_none() ? 0.f : total.max;
#pragma unroll 1
  for (u32 begin = 0; begin == 0 || begin < own; begin += KV_DECODE_JOIN_PARTS) {
    if (begin > 0) join.read(begin, first);
#pragma unroll
    for (u32 i = 0; i < Join::KNOWN; i++) {
      const float weight = kv_exp2(first[i] - from);
      join.weights[(i * 2 + w.lane / KV_DECODE_ROWS) * KV_DECODE_ROWS + row] = weight;
      total.sum += weight;
    }
    kv_syncwarp();  // all weights are there
    join.add(shared, begin, own - begin < KV_DECODE_JOIN_PARTS ? own : begin + KV_DECODE_JOIN_PARTS);
    kv_syncwarp();  // and nobody needs them any more
  }
  total.sum += kv_shfl_xorf(total.sum, KV_DECODE_ROWS);
  if (w.lane < KV_DECODE_ROWS) shared.put(w.warp, row, total);
}
