// Weights of rows with scales of their own, and the transform of their queries. Part of decode.h.
#pragma once
#include "transform.h"

// Multiplies the weights of a subtile with the scales of V and packs them, in the unit of their query row. Where some
// are many units, the unit becomes the largest of them and what was added up follows: the first time, and seldom after.
template <class F, int DIM>
KV_DEV void kv_decode_scale(KvDecodeRows& rows, typename F::Weights& weights, const u8* v_rows, u32 lead, u32 lane,
                            u32 (&packed)[2][4], float (&o)[DIM / 8][4]) {
  F::multiply(F::template scale<DIM>(v_rows + lane * F::template room<DIM>(), lead), lane, weights);
  float large[2] = {0.f, 0.f};
#pragma unroll
  for (u32 n = 0; n < 4; n++)
#pragma unroll
    for (u32 j = 0; j < 4; j++) large[j >> 1] = kv_max(large[j >> 1], weights[n][j]);
  const float most = KV_DECODE_UNITS_OF_WEIGHT;
  if (kv_any(large[0] > rows.unit[0] * most || large[1] > rows.unit[1] * most)) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      large[h] = kv_max(large[h], kv_shfl_xorf(large[h], 1));
      large[h] = kv_max(large[h], kv_shfl_xorf(large[h], 2));
      if (large[h] <= rows.unit[h]) continue;
      const float shrink = rows.unit[h] * kv_rcp(large[h]);
      rows.unit[h] = large[h];
#pragma unroll
      for (u32 d = 0; d < DIM / 8; d++) {
        o[d][h * 2] *= shrink;
        o[d][h * 2 + 1] *= shrink;
      }
    }
  }
  const float parts[2] = {kv_rcp(rows.unit[0]), kv_rcp(rows.unit[1])};
#pragma unroll
  for (u32 n = 0; n < 4; n++)
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const float* pair = weights[n] + h * 2;
      packed[n / 2][n % 2 * 2 + h] = kv_pack(KvF16(), pair[0] * parts[h], pair[1] * parts[h]);
    }
}

// kv_decode_sum_apart for them. The zeros it leaves are those of the scales too: nothing times a NaN is one.
template <class F, int DIM>
KV_DEV void kv_decode_sum_scaled_apart(const KvDecodeWork& w, u32 base, const KvDecodeRows& rows,
                                       const typename F::Weights& weights, u8* v_rows, u32 lead,
                                       float (&o)[DIM / 8][4]) {
  const KvAttendParams& a = w.p.attend;
  const u32 lane = w.lane;
  u32 apart = kv_decode_apart(w, base);
  while (apart != 0) {
    const u32 token = 31 - kv_clz(apart), from = (lane & ~3u) + (token >> 1 & 3), begin = kv_shfl(lead, token);
    apart &= ~(1u << token);
    // Out of a shuffle, so that the compiler does not keep what follows from it in registers for the whole kernel.
    const u32 t = kv_shfl(lane & 3, lane);
    u8* const row = v_rows + token * F::template room<DIM>();
    const float scale = F::template scale<DIM>(row, begin);
    float weight[2];
    bool sees[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      float own[4];
#pragma unroll
      for (u32 n = 0; n < 4; n++) own[n] = token & 1 ? weights[n][h * 2 + 1] : weights[n][h * 2];
      const float low = token & 8 ? own[1] : own[0], high = token & 8 ? own[3] : own[2];
      weight[h] = kv_shflf(token & 16 ? high : low, from) * scale * kv_rcp(rows.unit[h]);
      sees[h] = rows.sees(h, base + token, a.sink_tokens);
    }
#pragma unroll
    for (u32 d = 0; d < DIM / 8; d++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        const float x = F::template value<DIM>(row, begin, d, j, t);
        if (sees[j >> 1]) o[d][j] += weight[j >> 1] * x;
      }
    kv_syncwarp();
    for (u32 i = lane; i < F::template room<DIM>() / 16; i += 32) ((uint4*)row)[i] = make_uint4(0, 0, 0, 0);
  }
  kv_syncwarp();
}

// kv_rotate of a row that lies in four lanes, each with a quarter of every run of a power of two: whatever bits of a
// column say which lane it is, sums and differences are taken along all of them.
template <int DIM, int BASE> KV_DEV void kv_decode_rotate(float (&x)[DIM / 4], u32 t) {
  constexpr int RUN = kv_decode_run(DIM - BASE), OWN = RUN / 4, FIRST = BASE / 4;
#pragma unroll
  for (int step = 1; step < OWN; step *= 2)
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      if ((i & step) != 0) continue;
      const float low = x[FIRST + i], high = x[FIRST + i + step];
      x[FIRST + i] = low + high;
      x[FIRST + i + step] = low - high;
    }
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const float own = x[FIRST + i], other = kv_shfl_xorf(own, step);
      x[FIRST + i] = (t & step) != 0 ? other - own : own + other;
    }
  // 1 / sqrt(RUN)
  constexpr float norm = RUN == 256 ? 0.0625f : RUN == 128 ? 0.08838834764831845f : RUN == 64 ? 0.125f
                         : RUN == 32 ? 0.1767766952966369f : 0.25f;
#pragma unroll
  for (int i = 0; i < OWN; i++) x[FIRST + i] *= norm;
  if constexpr (BASE + RUN < DIM) kv_decode_rotate<DIM, BASE + RUN>(x, t);
}
