// How the results of warps, and of pieces, become rows of the output. Part of decode.h.
#pragma once

constexpr u32 kv_decode_stride(u32 dim) { return dim + 4; }  // from a row of a warp's results to the next

// A row before its last division: the sum of weights relative to 2^max.
struct KvDecodeTotal { float max, sum; };

// What two neighbouring values of a row are multiplied with, and the logarithm of the row's sum, once the sink logit of
// its head has joined.
KV_DEV float kv_decode_share(const KvDecodeWork& w, u32 head, KvDecodeTotal total, float& lse) {
  const float none = kv_decode_none();
  const float sink = w.p.attend.sink_logits == 0 ? none : ((const float*)w.p.attend.sink_logits)[head] * KV_LOG2_E;
  const float max = kv_max(total.max, sink);
  if (max == none) {  // nothing at all, or nothing that is a number
    lse = total.sum == 0.f ? none : kv_as_f(0x7fc00000u);
    return total.sum == 0.f ? 0.f : kv_as_f(0x7fc00000u);
  }
  const float shrink = total.max == max ? 1.f : kv_exp2(total.max - max);
  const float sum = total.sum * shrink + (sink == none ? 0.f : kv_exp2(sink - max));
  lse = (max + kv_log2(sum)) * KV_LN_2;
  return total.sum == 0.f ? 0.f : shrink / sum;
}

// Two values as the output has them.
KV_DEV u32 kv_decode_pair(const KvTensor& out, float x, float y) {
  return out.dtype == KV_F16 ? kv_pack(KvF16(), x, y) : kv_pack(KvBf16(), x, y);
}

// Writes values `column` and `column + 1` of a row, and its log-sum-exp beside the first. Where rows have scales they
// go to `values`, which kv_decode_finish writes.
template <class F, int DIM>
KV_DEV void kv_decode_write(const KvDecodeWork& w, u32 row, u32 column, KvDecodeTotal total, float x, float y,
                            float* values) {
  const KvAttendParams& a = w.p.attend;
  const u32 query = (w.piece.row + row) / a.group, head = w.piece.head * a.group + (w.piece.row + row) % a.group;
  float lse;
  float share = kv_decode_share(w, head, total, lse);
  if constexpr (F::SCALED) {
    float* const to = values + row * kv_decode_stride(DIM) + column;
    to[0] = share == 0.f ? 0.f : x * share;
    to[1] = share == 0.f ? 0.f : y * share;
  } else {
    u32* out = (u32*)(kv_head_row(a.out, w.piece.sequence, w.sequence.q_start, query, head) + column * 2);
    if (share == 0.f) {
      *out = 0;
    } else {
      if (F::CODES) share *= kv_constants(a.v_plane, w.piece.head).scale;
      *out = kv_decode_pair(a.out, x * share, y * share);
    }
  }
  if (column == 0 && a.lse.data != 0) {
    *(float*)kv_head_row(a.lse, w.piece.sequence, w.sequence.q_start, query, head) = lse;
  }
}

// Writes rows that lie in shared memory, turned back where those of V were turned.
template <class F, int DIM> KV_DEV void kv_decode_finish(const KvDecodeWork& w, float* values) {
  const KvAttendParams& a = w.p.attend;
  kv_sync();
  for (u32 row = w.warp; row < w.rows; row += KvDecodeRing<F, DIM>::WARPS) {
    float* const from = values + row * kv_decode_stride(DIM);
    if (a.v_plane.transforms != 0) {
      kv_transform_output(from, kv_constants(a.v_plane, w.piece.head).back, DIM, w.lane);
    }
    const u32 query = (w.piece.row + row) / a.group, head = w.piece.head * a.group + (w.piece.row + row) % a.group;
    u32* const to = (u32*)kv_head_row(a.out, w.piece.sequence, w.sequence.q_start, query, head);
    for (u32 i = w.lane; i < DIM / 2; i += 32) to[i] = kv_decode_pair(a.out, from[i * 2], from[i * 2 + 1]);
  }
}

// The last of the parts joins them: totals first, then rows, each in the order of parts.
template <class F, int DIM> KV_DEV void kv_decode_join(const KvDecodeWork& w, float* shared) {
  const u32 parts = w.piece.parts, threads = KvDecodeRing<F, DIM>::WARPS * 32;
  const float* stats = (const float*)w.p.attend.part_stats + (u64)w.piece.partial * KV_DECODE_ROWS;
  const float* values = (const float*)w.p.attend.part_rows + (u64)w.piece.partial * KV_DECODE_ROWS * DIM;
  for (u32 i = threadIdx.x; i < w.rows * (DIM / 2); i += threads) {
    const u32 row = i / (DIM / 2), column = i % (DIM / 2) * 2;
    KvDecodeTotal total = {kv_decode_none(), 0.f};
#pragma unroll 4
    for (u32 part = 0; part < parts; part++) {
      total.max = kv_max(total.max, kv_ldcg(stats + part * KV_DECODE_ROWS + row));
    }
    const float from = total.max == kv_decode_none() ? 0.f : total.max;
    float x = 0.f, y = 0.f;
#pragma unroll 4
    for (u32 part = 0; part < parts; part++) {
      const float* at = values + ((u64)part * KV_DECODE_ROWS + row) * DIM + column;
      const float weight = kv_exp2(kv_ldcg(stats + part * KV_DECODE_ROWS + row) - from);
      total.sum += weight;
      x += weight * kv_ldcg(at);
      y += weight * kv_ldcg(at + 1);
    }
    kv_decode_write<F, DIM>(w, row, column, total, x, y, shared);
  }
  if constexpr (F::SCALED) kv_decode_finish<F, DIM>(w, shared);
}

// Joins the warps, in their order. A piece that is the whole of its rows writes them; others leave a partial result:
// rows divided by their sums, and the binary logarithms of the sums.
template <class F, int DIM>
KV_DEV void kv_decode_merge(const KvDecodeWork& w, KvDecodeRows& rows, const float (&o)[DIM / 8][4], u8* memory) {
  constexpr u32 WARPS = KvDecodeRing<F, DIM>::WARPS, STRIDE = kv_decode_stride(DIM);
  const u32 g = w.lane >> 2, t = w.lane & 3;
  float* const values = (float*)memory;  // [WARPS][16][STRIDE]
  float* const max = values + WARPS * KV_DECODE_ROWS * STRIDE;
  float* const sum = max + WARPS * KV_DECODE_ROWS;
  u32* const flag = (u32*)(sum + WARPS * KV_DECODE_ROWS);
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    rows.sum[h] += kv_shfl_xorf(rows.sum[h], 1);
    rows.sum[h] += kv_shfl_xorf(rows.sum[h], 2);
    const u32 row = w.warp * KV_DECODE_ROWS + g + h * 8;
    if (t == 0) {
      max[row] = rows.max[h];
      sum[row] = rows.sum[h];
    }
#pragma unroll
    for (u32 d = 0; d < DIM / 8; d++)
#pragma unroll
      for (u32 j = 0; j < 2; j++) {
        float x = o[d][h * 2 + j];
        if constexpr (F::SCALED) x *= rows.unit[h] * F::UNIT;
        values[row * STRIDE + F::template column<DIM>(d, j, t)] = x;
      }
  }
  kv_sync();
  const u64 partial = (u64)(w.piece.partial + w.piece.part) * KV_DECODE_ROWS;
  for (u32 i = threadIdx.x; i < w.rows * (DIM / 2); i += WARPS * 32) {
    const u32 row = i / (DIM / 2), column = i % (DIM / 2) * 2;
    KvDecodeTotal total = {kv_decode_none(), 0.f};
#pragma unroll
    for (u32 warp = 0; warp < WARPS; warp++) total.max = kv_max(total.max, max[warp * KV_DECODE_ROWS + row]);
    const float from = total.max == kv_decode_none() ? 0.f : total.max;
    float x = 0.f, y = 0.f;
#pragma unroll
    for (u32 warp = 0; warp < WARPS; warp++) {
      const u32 at = warp * KV_DECODE_ROWS + row;
      const float weight = kv_exp2(max[at] - from);
      total.sum += weight * sum[at];
      x += weight * values[at * STRIDE + column];
      y += weight * values[at * STRIDE + column + 1];
    }
    if (w.piece.parts == 1) {
      kv_decode_write<F, DIM>(w, row, column, total, x, y, values);  // nobody else reads this place
      continue;
    }
    const float share = total.sum == 0.f ? 0.f : 1.f / total.sum;
    float* to = (float*)w.p.attend.part_rows + (partial + row) * DIM + column;
    to[0] = x * share;
    to[1] = y * share;
    if (column == 0) {
      ((float*)w.p.attend.part_stats)[partial + row] = total.sum == 0.f ? kv_decode_none() : from + kv_log2(total.sum);
    }
  }
  if (w.piece.parts == 1) {
    if constexpr (F::SCALED) kv_decode_finish<F, DIM>(w, values);
    return;
  }
  kv_fence();
  kv_sync();
  if (threadIdx.x == 0) *flag = kv_atomic_inc((u32*)w.p.attend.counters + w.piece.partial, w.piece.parts - 1);
#ifndef KV_BUG_FLAG
  kv_sync();
#endif
  if (*flag != w.piece.parts - 1) return;
  kv_fence();
  kv_decode_join<F, DIM>(w, values);
}
