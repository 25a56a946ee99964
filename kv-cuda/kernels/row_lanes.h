// A row of 64, 128 or 256 values in the registers of 4, 8 or 16 lanes: loads, the transform and
// stores, 16 values a lane. A warp holds 8, 4 or 2 rows. All its lanes call together; rows that do
// not exist are computed and not stored.
//
// Values 0 to 7 of lane `k` are those of the row from `8 * k` on, values 8 to 15 those from
// `DIM / 2 + 8 * k` on: lanes that are next to each other access neighbouring memory.
//
// Rotation and encoding give the bits of transform.h and encode.h: the units are compiled with
// `--fmad=false`.
#pragma once
#include "convert.h"
#include "transform.h"

// The unconverted bytes of a lane's values: two words of 16 bytes in 16 bits, four in f32.
struct KvRawLane { KvWords4 part[4]; };

template <u32 DIM> struct KvRowLane {
  static constexpr u32 LANES = DIM / 16, ROWS = 32 / LANES, HALF = DIM / 2;
  static_assert(LANES >= 2 && LANES <= 16 && (LANES & (LANES - 1)) == 0, "a power of two between 2 and 16 lanes");

  u32 lane;  // in the row
  float x[16];

  // Returns the index in the row of this lane's value 0 or 8.
  KV_DEV static u32 first(u32 lane, u32 half) { return half * HALF + lane * 8; }

  // Reads a row whose address is a multiple of 16 bytes.
  KV_DEV static KvRawLane read(u32 dtype, const u8* row, u32 lane) {
    KvRawLane raw = {};
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      const u8* at = row + first(lane, half) * kv_dtype_bytes(dtype);
      raw.part[half] = *(const KvWords4*)at;
      if (dtype == KV_F32) raw.part[half + 2] = *(const KvWords4*)(at + 16);
    }
    return raw;
  }
  // Writes what `read` returned, unchanged.
  KV_DEV static void copy(u32 dtype, const KvRawLane& raw, u8* row, u32 lane) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      u8* at = row + first(lane, half) * kv_dtype_bytes(dtype);
      *(KvWords4*)at = raw.part[half];
      if (dtype == KV_F32) *(KvWords4*)(at + 16) = raw.part[half + 2];
    }
  }
  KV_DEV void convert(u32 dtype, const KvRawLane& raw) {
#pragma unroll
    for (u32 half = 0; half < 2; half++)
#pragma unroll
      for (u32 i = 0; i < 8; i++) {
        const u16 bits = (u16)(raw.part[half].word[i / 2] >> (i % 2 * 16));
        const float wide = kv_as_f(raw.part[i < 4 ? half : half + 2].word[i % 4]);
        x[half * 8 + i] = dtype == KV_F32 ? wide : dtype == KV_F16 ? kv_f16_f(bits) : kv_bf16_f(bits);
      }
  }
  // Writes a row whose address is a multiple of 16 bytes.
  KV_DEV void write(u32 dtype, u8* row) const {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      float values[8];
#pragma unroll
      for (u32 i = 0; i < 8; i++) values[i] = x[half * 8 + i];
      kv_store8(dtype, row + first(lane, half) * kv_dtype_bytes(dtype), values);
    }
  }

  // Reads this lane's part of an array of f32 with a value per channel.
  KV_DEV void channels(const float* list, float (&values)[16]) const {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      const float* at = list + first(lane, half);
      if (((u64)at & 15) == 0) {
        const KvFloat4 low = *(const KvFloat4*)at, high = *(const KvFloat4*)(at + 4);
        const float all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (u32 i = 0; i < 8; i++) values[half * 8 + i] = all[i];
      } else {
#pragma unroll
        for (u32 i = 0; i < 8; i++) values[half * 8 + i] = at[i];
      }
    }
  }

  // kv_rotate: strides within a lane, then across lanes, then between the halves.
  KV_DEV void rotate() {
    constexpr u32 BITS = DIM == 64 ? 6 : DIM == 128 ? 7 : 8;
    const float halved = kv_as_f((127 - BITS / 2) << 23);
    const float norm = BITS % 2 == 1 ? halved * 0.70710678118654752440f : halved;
#pragma unroll
    for (u32 stride = 1; stride < 8; stride *= 2)
#pragma unroll
      for (u32 i = 0; i < 16; i++)
        if ((i & stride) == 0) butterfly(i, i + stride);
#pragma unroll
    for (u32 mask = 1; mask < LANES; mask *= 2) {
      // a + b in the first lane of a pair, a - b in the second, each with one rounding.
      const float sign = (lane & mask) != 0 ? -1.f : 1.f;
#pragma unroll
      for (u32 i = 0; i < 16; i++) x[i] = kv_fma(sign, x[i], kv_shfl_xorf(x[i], (int)mask));
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
      butterfly(i, i + 8);
      x[i] *= norm;
      x[i + 8] *= norm;
    }
  }
  KV_DEV void butterfly(u32 i, u32 j) {
    const float a = x[i], b = x[j];
    x[i] = a + b;
    x[j] = a - b;
  }

  // kv_transform_store and kv_transform_load.
  KV_DEV void transform_store(const float* mean, const float* into) {
    float factors[16], means[16];
    channels(mean, means);
    channels(into, factors);
#pragma unroll
    for (u32 i = 0; i < 16; i++) x[i] = kv_saturated((x[i] - means[i]) * factors[i]);
    rotate();
  }
  KV_DEV void transform_load(const float* mean, const float* back) {
    rotate();
    float factors[16], means[16];
    channels(back, factors);
    channels(mean, means);
#pragma unroll
    for (u32 i = 0; i < 16; i++) x[i] = x[i] * factors[i] + means[i];
  }
};

// Stores `bytes` bytes, an even number, at an even address by the LANES lanes of a row. `own` is
// shared memory with them, at an address that equals `to` modulo 16.
template <u32 LANES> KV_DEV void kv_store_staged(u8* to, const u8* own, u32 bytes, u32 lane) {
  const u32 head = (u32)(0 - (u64)to) & 15, units = (bytes - head) / 16, tail = head + units * 16;
  for (u32 i = lane * 2; i < head; i += LANES * 2) *(u16*)(to + i) = *(const u16*)(own + i);
  for (u32 i = lane; i < units; i += LANES) *(KvWords4*)(to + head + i * 16) = *(const KvWords4*)(own + head + i * 16);
  for (u32 i = tail + lane * 2; i < bytes; i += LANES * 2) *(u16*)(to + i) = *(const u16*)(own + i);
}
