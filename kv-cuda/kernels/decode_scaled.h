// Weights for V rows with scales, and the Hadamard transform of queries. Part of decode.h.
#pragma once
#include "transform.h"

// Multiplies the weights of a subtile by the scales of V and packs them relative to the
// weight_scale of their query row. If a product exceeds the limit, weight_scale becomes the largest
// product and the output is rescaled: at the first subtile, and rarely later.
template <class F, int DIM>
KV_DEV void kv_decode_scale(KvDecodeRows& rows, typename F::Weights& weights, u32 v_rows, u32 lane,
                            u32 (&packed)[2][4], float (&o)[DIM / 8][4]) {
  F::multiply(F::template scale<DIM>(v_rows, lane), lane, weights);
  float largest[2] = {0.f, 0.f};
#pragma unroll
  for (u32 n = 0; n < 4; n++)
#pragma unroll
    for (u32 j = 0; j < 4; j++) largest[j >> 1] = kv_max(largest[j >> 1], weights[n][j]);
  const float most = KV_DECODE_WEIGHT_MAX;
  if (kv_any(largest[0] > rows.weight_scale[0] * most || largest[1] > rows.weight_scale[1] * most)) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      largest[h] = kv_max(largest[h], kv_shfl_xorf(largest[h], 1));
      largest[h] = kv_max(largest[h], kv_shfl_xorf(largest[h], 2));
      if (largest[h] <= rows.weight_scale[h]) continue;
      const float shrink = rows.weight_scale[h] * kv_rcp(largest[h]);
      rows.weight_scale[h] = largest[h];
#pragma unroll
      for (u32 d = 0; d < DIM / 8; d++) {
        o[d][h * 2] *= shrink;
        o[d][h * 2 + 1] *= shrink;
      }
    }
  }
  const float inverse[2] = {kv_rcp(rows.weight_scale[0]), kv_rcp(rows.weight_scale[1])};
#pragma unroll
  for (u32 n = 0; n < 4; n++)
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const float* pair = weights[n] + h * 2;
      packed[n / 2][n % 2 * 2 + h] = kv_pack(KvF16(), pair[0] * inverse[h], pair[1] * inverse[h]);
    }
}

// Zeroes rows of a subtile, lane `token` one if `is_masked`: codes and scale, since 0 * NaN is NaN.
template <class F, int DIM> KV_DEV void kv_decode_zero(u8* rows, u32 lane, bool is_masked) {
  u16* const row = (u16*)(rows + lane * F::template row_bytes<DIM>());
  if (is_masked) {
    for (u32 i = 0; i < F::template row_bytes<DIM>() / 2; i++) row[i] = 0;
  }
  kv_syncwarp();
}

// kv_decode_sum_masked for rows with scales.
template <class F, int DIM>
KV_DEV void kv_decode_sum_scaled_masked(const KvDecodeWork& w, u32 base, const KvDecodeRows& rows,
                                       const typename F::Weights& weights, u8* v_rows, float (&o)[DIM / 8][4]) {
  const KvAttendParams& a = w.p.attend;
  const u32 lane = w.lane, all = kv_decode_partly_visible(w, base);
  for (u32 partly_visible = all; partly_visible != 0;) {
    const u32 token = 31 - kv_clz(partly_visible), from = (lane & ~3u) + (token >> 1 & 3);
    partly_visible &= ~(1u << token);
    // The shuffle keeps the compiler from holding values derived from the lane for the whole
    // kernel.
    const u32 t = kv_shfl(lane & 3, lane);
    const u8* const row = v_rows + token * F::template row_bytes<DIM>();
    const float scale = F::template scale<DIM>(kv_smem_addr(v_rows), token);
    float weight[2];
    bool visible[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      float own[4];
#pragma unroll
      for (u32 n = 0; n < 4; n++) own[n] = token & 8 ? weights[n][h * 2 + 1] : weights[n][h * 2];
      const float low = token & 1 ? own[1] : own[0], high = token & 1 ? own[3] : own[2];
      weight[h] = kv_shflf(token & 16 ? high : low, from) * scale * kv_rcp(rows.weight_scale[h]);
      visible[h] = rows.is_visible(h, base + token, a.sink_tokens);
    }
#pragma unroll
    for (u32 d = 0; d < DIM / 8; d++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        const float x = F::template value<DIM>(row, d, j, t);
        if (visible[j >> 1]) o[d][j] += weight[j >> 1] * x;
      }
  }
  kv_syncwarp();
  kv_decode_zero<F, DIM>(v_rows, lane, (all >> lane & 1) != 0);
}

// kv_rotate for a row that 8 lanes share, each with an eighth of every power-of-two run; `own` is the
// lane's number. Butterflies run over all bits of the column, in any order: those inside a lane first,
// then those across lanes.
template <int DIM, int BASE> KV_DEV void kv_decode_rotate(float (&x)[DIM / 8], u32 own) {
  constexpr int RUN = kv_decode_run(DIM - BASE), WIDTH = RUN / 8, FIRST = BASE / 8;
#pragma unroll
  for (int step = 1; step < WIDTH; step *= 2)
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      if ((i & step) != 0) continue;
      const float low = x[FIRST + i], high = x[FIRST + i + step];
      x[FIRST + i] = low + high;
      x[FIRST + i + step] = low - high;
    }
#pragma unroll
  for (u32 step = 1; step < 8; step *= 2)
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      const float value = x[FIRST + i], other = kv_shfl_xorf(value, step);
      x[FIRST + i] = (own & step) != 0 ? other - value : value + other;
    }
  // 1 / sqrt(RUN)
  constexpr float norm = RUN == 256 ? 0.0625f : RUN == 128 ? 0.08838834764831845f : RUN == 64 ? 0.125f
                         : RUN == 32 ? 0.1767766952966369f : 0.25f;
#pragma unroll
  for (int i = 0; i < WIDTH; i++) x[FIRST + i] *= norm;
  if constexpr (BASE + RUN < DIM) kv_decode_rotate<DIM, BASE + RUN>(x, own);
}
