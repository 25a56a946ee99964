// Query rows of a work item as A fragments of the mma. Part of decode.h.
#pragma once

template <class F, int DIM> struct KvDecodeQuery {
  // Long rows would need the registers of the output: their fragments are in shared memory, in the
  // order in which lanes read them.
  static constexpr bool IS_SHARED = DIM >= 192;
  static constexpr u32 HIGH_BYTES = IS_SHARED ? DIM * 32 : 0, SHARED_BYTES = HIGH_BYTES + (F::SCALED ? DIM * 32 : 0);
  static constexpr u32 STEPS = DIM / 16;

  u32 fragments[IS_SHARED ? 1 : STEPS][4];
  const uint4* shared;
  // For rows with scales: whether queries were transformed. Then the rounding errors of their f16
  // values are multiplied separately, from fragments that follow the others in shared memory.
  bool has_low;

  KV_DEV void get_low(u32 k, u32 lane, u32 (&a)[4]) const {
    const uint4 x = shared[HIGH_BYTES / 16 + k * 32 + lane];
    a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
  }
  KV_DEV void get(u32 k, u32 lane, u32 (&a)[4]) const {
    if constexpr (IS_SHARED) {
      const uint4 x = shared[k * 32 + lane];
      a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
    } else {
#pragma unroll
      for (u32 r = 0; r < 4; r++) a[r] = fragments[k][r];
    }
  }

  static KV_DEV u32 column(u32 k, u32 r, u32 t) {
    if constexpr (F::CODES) return F::template query_column<DIM>(k, r, t);
    else return F::query_column(k, r, t);
  }

  // Initialises the state of row h and returns its address; null for a row without a query.
  static KV_DEV const u16* begin_row(const KvDecodeWork& w, u32 h, KvDecodeRows& rows) {
    const KvAttendParams& a = w.p.attend;
    const u32 own = (w.lane >> 2) + h * 8, row = w.item.row + own;
    rows.visible[h] = {0, KV_NONE, 0};  // a row without a query masks nothing
    rows.max[h] = kv_minus_inf();
    rows.sum[h] = 0.f;
    if (own >= w.rows) return nullptr;
    const u32 query = row / a.group;
    rows.visible[h] = kv_visible(a, w.sequence, query);
    return (const u16*)kv_head_row(a.q, w.item.sequence, w.sequence.q_start, query,
                                   w.item.head * a.group + row % a.group);
  }
  // Returns the factor that turns scores into log2 units; with a soft cap, into arguments of its
  // tanh.
  static KV_DEV float factor_of(const KvAttendParams& a, float scale) {
    return a.soft_cap > 0.f ? scale / a.soft_cap : scale * KV_LOG2_E;
  }
  // Finds the power of two that brings values up to `amax` into the range of f16: it scales amax to
  // between 256 and 512, unless amax is almost zero or infinite.
  static KV_DEV void scale_to_f16(float amax, float& shift, float& inverse) {
    const u32 exponent = kv_as_u(amax) >> 23;
    if (exponent < 9 || exponent > 254) return;
    shift = kv_as_f((262 - exponent) << 23);
    inverse = kv_as_f((exponent - 8) << 23);
  }

  // Loads the rows; zeros for rows without a query.
  KV_DEV void load(const KvDecodeWork& w, KvDecodeRows& rows, u8* smem) {
    const KvAttendParams& a = w.p.attend;
    const u32 t = w.lane & 3;
    // Codes are multiplied in f16: queries of bf16 are scaled to its range.
    const bool convert = F::CODES && a.q.dtype == KV_BF16;
    const u16* from[2];
    float inverse[2] = {1.f, 1.f}, shift[2] = {1.f, 1.f};
#pragma unroll
    for (u32 h = 0; h < 2; h++) from[h] = begin_row(w, h, rows);
    if (convert) {
      float amax[2] = {0.f, 0.f};
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        for (u32 i = t * 2; i < DIM && from[h] != nullptr; i += 8) {
          const u32 pair = *(const u32*)(from[h] + i);
          amax[h] = kv_max(amax[h], kv_as_f(pair << 16 & 0x7fffffffu));
          amax[h] = kv_max(amax[h], kv_as_f(pair & 0x7fff0000u));
        }
        amax[h] = kv_max(amax[h], kv_shfl_xorf(amax[h], 1));
        amax[h] = kv_max(amax[h], kv_shfl_xorf(amax[h], 2));
        scale_to_f16(amax[h], shift[h], inverse[h]);
      }
    }
    const float factor = factor_of(a, F::CODES ? a.scale * kv_constants(a.k_plane, w.item.head).scale : a.scale);
    rows.factor[0] = factor * inverse[0];
    rows.factor[1] = factor * inverse[1];
    if constexpr (IS_SHARED) {
      shared = (const uint4*)smem;
      for (u32 k = w.warp; k < STEPS; k += KvDecodeRing<F, DIM>::WARPS) {
        u32 x[4];
        step(from, convert, shift, k, t, x);
        ((uint4*)smem)[k * 32 + w.lane] = make_uint4(x[0], x[1], x[2], x[3]);
      }
      kv_sync();
    } else {
      shared = nullptr;
#pragma unroll
      for (u32 k = 0; k < STEPS; k++) step(from, convert, shift, k, t, fragments[k]);
    }
  }

  // The same for K rows with scales, which may be transformed. Queries are then transformed too, in
  // f32, and the mean that was subtracted from keys becomes a bias of the scores. Four lanes share
  // a row.
  KV_DEV void load_scaled(const KvDecodeWork& w, KvDecodeRows& rows, u8* smem) {
    const KvAttendParams& a = w.p.attend;
    const u32 t = w.lane & 3;
    const bool transform = a.k_plane.transforms != 0;
    const KvConstants constants = kv_constants(a.k_plane, w.item.head);
    const float factor = factor_of(a, a.scale);
    shared = (const uint4*)smem;
    has_low = transform;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const u16* from = begin_row(w, h, rows);
      float x[DIM / 4], bias = 0.f, amax = 0.f, shift = 1.f, inverse = 1.f;
#pragma unroll
      for (u32 i = 0; i < DIM / 4; i += 2) {
        const u32 column = F::template query_column<DIM>(i / 4, i % 4, t);
        const u32 pair = from == nullptr ? 0 : *(const u32*)(from + column);
        x[i] = a.q.dtype == KV_F16 ? kv_f16_f((u16)pair) : kv_bf16_f((u16)pair);
        x[i + 1] = a.q.dtype == KV_F16 ? kv_f16_f((u16)(pair >> 16)) : kv_bf16_f((u16)(pair >> 16));
        if (transform) {
          bias += x[i] * constants.mean[column] + x[i + 1] * constants.mean[column + 1];
          x[i] *= constants.back[column];
          x[i + 1] *= constants.back[column + 1];
        }
      }
      if (transform) {
        kv_decode_rotate<DIM, 0>(x, t);
        bias += kv_shfl_xorf(bias, 1);
        bias += kv_shfl_xorf(bias, 2);
      }
#pragma unroll
      for (u32 i = 0; i < DIM / 4; i++) amax = kv_max(amax, kv_as_f(kv_as_u(x[i]) & 0x7fffffffu));
      amax = kv_max(amax, kv_shfl_xorf(amax, 1));
      amax = kv_max(amax, kv_shfl_xorf(amax, 2));
      scale_to_f16(amax, shift, inverse);
      rows.factor[h] = factor * inverse * F::LEVEL_SCALE;
      rows.bias[h] = factor * bias;
      rows.weight_scale[h] = KV_DECODE_WEIGHT_SCALE_MIN;
#pragma unroll
      for (u32 k = 0; k < STEPS; k++)
#pragma unroll
        for (u32 r = 0; r < 4; r += 2) {
          const float first = x[k * 4 + r] * shift, second = x[k * 4 + r + 1] * shift;
          const u32 pair = kv_pack(KvF16(), first, second);
          if constexpr (!IS_SHARED) fragments[k][r + h] = pair;
          if (k % KvDecodeRing<F, DIM>::WARPS != w.warp) continue;
          u32* const to = (u32*)smem + (k * 32 + w.lane) * 4 + r + h;
          if constexpr (IS_SHARED) *to = pair;
          to[HIGH_BYTES / 4] = kv_pack(KvF16(), first - kv_f16_f((u16)pair), second - kv_f16_f((u16)(pair >> 16)));
        }
    }
    kv_sync();
  }

  static KV_DEV void step(const u16* const (&from)[2], bool convert, const float (&shift)[2], u32 k, u32 t,
                          u32 (&x)[4]) {
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
      const u32 h = r & 1;
      x[r] = from[h] == nullptr ? 0 : *(const u32*)(from[h] + column(k, r, t));
      if (convert) {
        x[r] = kv_pack(KvF16(), kv_bf16_f((u16)x[r]) * shift[h], kv_bf16_f((u16)(x[r] >> 16)) * shift[h]);
      }
    }
  }
};
