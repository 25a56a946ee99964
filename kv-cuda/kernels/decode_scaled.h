// The softmax and the weights of rows with scales, and the Hadamard transform of queries. Part of
// decode.h.
#pragma once
#include "transform.h"

// Weights are relative to 2^rows.max, an integer that is not the running maximum: weights may be up to
// 2^KV_DECODE_SCORE_MAX, and their products with the scales of V, which are packed to f16, up to
// KV_DECODE_WEIGHT_MAX. Only a score or a product above that raises it, at the first subtile and rarely
// later: no subtile waits for the maximum of a row, and scales of V that are all small lose no
// precision: the smallest scale in f16, 2^-24, gives a product of 2^-10. More would cost exponents their
// lower bits.
constexpr float KV_DECODE_SCORE_MAX = 14.f;
constexpr float KV_DECODE_WEIGHT_MAX = 1024.f;

// Scales the sum and the output of row h.
template <int DIM> KV_DEV void kv_decode_shrink(KvDecodeRows& rows, u32 h, float shrink, float (&o)[DIM / 8][4]) {
  rows.sum[h] *= shrink;
#pragma unroll
  for (u32 d = 0; d < DIM / 8; d++) {
    o[d][h * 2] *= shrink;
    o[d][h * 2 + 1] *= shrink;
  }
}

// kv_decode_softmax for rows with scales: weights stay f32.
template <class F, int DIM>
KV_DEV bool kv_decode_softmax_scaled(const KvDecodeWork& w, u32 base, KvDecodeRows& rows, float (&s)[4][4],
                                     float (&weights)[4][4], float (&o)[DIM / 8][4]) {
  const bool masked = kv_decode_is_masked(rows, base);
  const float minus_inf = kv_minus_inf();
  const float from[2] = {rows.max[0] == minus_inf ? 0.f : rows.max[0], rows.max[1] == minus_inf ? 0.f : rows.max[1]};
  if (masked || w.p.attend.soft_cap > 0.f) {
#pragma unroll
    for (u32 n = 0; n < 4; n++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) s[n][j] = s[n][j] * rows.factor[j >> 1] + rows.bias[j >> 1];
    kv_decode_cap_and_mask<F>(w, base, rows, masked, s);
#pragma unroll
    for (u32 n = 0; n < 4; n++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) s[n][j] -= from[j >> 1];
  } else {
    const float offset[2] = {rows.bias[0] - from[0], rows.bias[1] - from[1]};
#pragma unroll
    for (u32 n = 0; n < 4; n++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) s[n][j] = s[n][j] * rows.factor[j >> 1] + offset[j >> 1];
  }
  float max[2] = {minus_inf, minus_inf};
#pragma unroll
  for (u32 n = 0; n < 4; n++)
#pragma unroll
    for (u32 j = 0; j < 4; j++) max[j >> 1] = kv_max(max[j >> 1], s[n][j]);
  const float limit[2] = {rows.max[0] == minus_inf ? minus_inf : KV_DECODE_SCORE_MAX,
                          rows.max[1] == minus_inf ? minus_inf : KV_DECODE_SCORE_MAX};
  if (kv_any(max[0] > limit[0] || max[1] > limit[1])) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      max[h] = kv_max(max[h], kv_shfl_xorf(max[h], 1));
      max[h] = kv_max(max[h], kv_shfl_xorf(max[h], 2));
      if (!(max[h] > limit[h])) continue;
      const float rise = kv_rint(max[h]) - KV_DECODE_SCORE_MAX;
      kv_decode_shrink<DIM>(rows, h, rows.max[h] == minus_inf ? 0.f : kv_exp2(-rise), o);
      rows.max[h] = from[h] + rise;
#pragma unroll
      for (u32 n = 0; n < 4; n++)
#pragma unroll
        for (u32 j = 0; j < 2; j++) s[n][h * 2 + j] -= rise;
    }
  }
#pragma unroll
  for (u32 n = 0; n < 4; n++)
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      weights[n][j] = kv_exp2(s[n][j]);
      rows.sum[j >> 1] += weights[n][j];
    }
  return masked;
}

// Multiplies the weights of a subtile by the scales of V, and packs them.
template <class F, int DIM>
KV_DEV void kv_decode_scale(KvDecodeRows& rows, float (&weights)[4][4], u32 v_rows, u32 lane, u32 (&packed)[2][4],
                            float (&o)[DIM / 8][4]) {
  F::multiply(F::template scale<DIM>(v_rows, lane), lane, weights);
  float largest[2] = {0.f, 0.f};
#pragma unroll
  for (u32 n = 0; n < 4; n++)
#pragma unroll
    for (u32 j = 0; j < 4; j++) largest[j >> 1] = kv_max(largest[j >> 1], weights[n][j]);
  if (kv_any(largest[0] > KV_DECODE_WEIGHT_MAX || largest[1] > KV_DECODE_WEIGHT_MAX)) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      largest[h] = kv_max(largest[h], kv_shfl_xorf(largest[h], 1));
      largest[h] = kv_max(largest[h], kv_shfl_xorf(largest[h], 2));
      const u32 exponent = kv_as_u(largest[h]) >> 23;
      if (largest[h] <= 1.f || exponent == 255) continue;  // infinity becomes the output
      const float shrink = kv_as_f((254 - exponent) << 23);
      kv_decode_shrink<DIM>(rows, h, shrink, o);
      rows.max[h] += (float)(int)(exponent - 127);
#pragma unroll
      for (u32 n = 0; n < 4; n++)
#pragma unroll
        for (u32 j = 0; j < 2; j++) weights[n][h * 2 + j] *= shrink;
    }
  }
#pragma unroll
  for (u32 n = 0; n < 4; n++)
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      packed[n / 2][n % 2 * 2 + h] = kv_pack(KvF16(), weights[n][h * 2], weights[n][h * 2 + 1]);
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
                                       const float (&weights)[4][4], u8* v_rows, float (&o)[DIM / 8][4]) {
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
      weight[h] = kv_shflf(token & 16 ? high : low, from) * scale;
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
