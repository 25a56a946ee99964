// The transform of a row (mean, balance, signs, Hadamard rotation): kv-quant's transform.rs, on the
// device.
//
// One warp transforms one row. `x` points to its `dim` values in memory that the warp shares;
// `lane` is the thread's lane. All 32 lanes call; the values must be synchronised before, and are
// on return.
//
//   kv_transform_store(x, mean, into, dim, lane)   R((x - mean) * into): K and V, before encoding
//   kv_transform_load(x, mean, back, dim, lane)    R(x) * back + mean: K and V, after decoding
//   kv_transform_query(x, back, dim, lane)         R(q * back), with K's constants
//   kv_transform_output(x, back, dim, lane)        R(o) * back, with V's constants
//
// Bit for bit as in kv-quant if the compiler does not contract to FMA (`--fmad=false`), otherwise
// within rounding.
#pragma once
#include "dev.h"

// kv-quant's `rotate`: the orthonormal Walsh-Hadamard transform of each block, where the blocks are
// the powers of two that sum to `dim`, largest first.
KV_DEV void kv_rotate(float* x, u32 dim, u32 lane) {
  for (u32 bit = 32; bit-- > 1;) {  // a block of one value does not change
    const u32 block = 1u << bit;
    if ((dim & block) == 0) continue;
    const float halved = kv_as_f((127 - bit / 2) << 23);
    const float norm = bit % 2 == 1 ? halved * 0.70710678118654752440f : halved;
    for (u32 s = 0; s < bit; s++) {
      for (u32 pair = lane; pair < block / 2; pair += 32) {
        const u32 i = pair >> s << (s + 1) | (pair & ((1u << s) - 1)), j = i + (1u << s);
        const float a = x[i], b = x[j];
        x[i] = s + 1 == bit ? (a + b) * norm : a + b;
        x[j] = s + 1 == bit ? (a - b) * norm : a - b;
      }
      kv_syncwarp();
    }
    x += block;
  }
}

// Clamps to 2^112 in magnitude, infinities too, so that no sum of a rotation overflows; NaN stays.
// kv-quant's `STORED_MAX`.
KV_DEV float kv_saturated(float x) {
  const float most = kv_as_f((127 + 112) << 23);
  return x > most ? most : x < -most ? -most : x;
}

KV_DEV void kv_transform_store(float* x, const float* mean, const float* into, u32 dim, u32 lane) {
  for (u32 i = lane; i < dim; i += 32) x[i] = kv_saturated((x[i] - mean[i]) * into[i]);
  kv_syncwarp();
  kv_rotate(x, dim, lane);
}

KV_DEV void kv_transform_load(float* x, const float* mean, const float* back, u32 dim, u32 lane) {
  kv_rotate(x, dim, lane);
  for (u32 i = lane; i < dim; i += 32) x[i] = x[i] * back[i] + mean[i];
  kv_syncwarp();
}

KV_DEV void kv_transform_query(float* x, const float* back, u32 dim, u32 lane) {
  for (u32 i = lane; i < dim; i += 32) x[i] *= back[i];
  kv_syncwarp();
  kv_rotate(x, dim, lane);
}

KV_DEV void kv_transform_output(float* x, const float* back, u32 dim, u32 lane) {
  kv_rotate(x, dim, lane);
  for (u32 i = lane; i < dim; i += 32) x[i] *= back[i];
  kv_syncwarp();
}
