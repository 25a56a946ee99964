// Encoding of Lloyd-Max rows: kv-quant's lloyd_max.rs, planes.rs and sums.rs, on the device. See
// encode.h.
#pragma once
#include "lloyd.h"

// Floats of scratch memory in which a warp exchanges partial results.
constexpr u32 KV_PARTS = 64;
constexpr u32 KV_INFINITY = 0x7f800000u;

// The input of a warp's encoder, and memory that only this warp uses.
struct KvEncoder {
  float* x;
  float* parts;
  u8* bytes;  // the row, at an even address; initially 0
  u32 dim, scales_begin, lane;
};

KV_DEV void kv_put_half(u8* to, u16 bits) { *(u16*)to = bits; }

// Returns the larger of two magnitudes as bits. Bits of non-negative floats are ordered like their
// values, with NaN above infinity.
KV_DEV u32 kv_amax_bits(u32 amax, float value) {
  const u32 bits = kv_as_u(value) & 0x7fffffffu;
  return bits > amax ? bits : amax;
}

// Returns the maximum over the `2 * FIRST` lanes that differ in the low bits of their numbers.
template <u32 FIRST> KV_DEV u32 kv_max_of(u32 value) {
#pragma unroll
  for (u32 mask = FIRST; mask > 0; mask /= 2) {
    const u32 other = kv_shfl_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

// The end of sums.rs: eight partial sums, ((a + e) + (c + g)) + ((b + f) + (d + h)).
KV_DEV float kv_sum_of_8(float sum) {
#pragma unroll
  for (u32 mask = 4; mask > 0; mask /= 2) sum += kv_shfl_xorf(sum, mask);
  return sum;
}

constexpr float KV_LLOYD_LIMIT = 1099511627776.f;  // 2^40
KV_DEV float kv_limited(float value) {
  const float magnitude = kv_abs(value);
  return magnitude < KV_LLOYD_LIMIT ? magnitude : KV_LLOYD_LIMIT;
}

// Returns the scale that is probably best, a combination of rms and largest magnitude: lloyd.rs.
template <u32 BITS> KV_DEV float kv_near_scale(float rms, float amax) {
  if (BITS == 3) return 0.462f * rms + 0.190f * amax;
  return BITS == 4 ? 0.086f * rms + 0.310f * amax : 0.515f * rms + 0.124f * amax;
}
template <u32 BITS> KV_DEV float kv_near_group_scale(float rms, float amax) {
  if (BITS == 3) return 0.057f * rms + 0.390f * amax;
  return BITS == 4 ? 0.064f * rms + 0.337f * amax : 0.535f * rms + 0.111f * amax;
}

// Returns the code of a value; kv_nearest returns the magnitude of its level.
template <u32 BITS> KV_DEV u32 kv_lloyd_code(float value, float inverse) {
  return kv_nearest_index<BITS>(kv_limited(value) * inverse) | kv_as_u(value) >> 31 << (BITS - 1);
}
template <u32 BITS> KV_DEV float kv_nearest(float value) {
  return kv_magnitude<BITS>(kv_nearest_index<BITS>(value));
}

// Returns a byte of a bit plane: bits `from..from + W` of each code. `codes` holds codes as the
// bits of floats.
template <u32 W> KV_DEV u32 kv_plane_byte(const float* codes, u32 n, u32 from, u32 byte) {
  const u32 m = (n + 8 / W - 1) / (8 / W);
  u32 bits = 0;
#pragma unroll
  for (u32 j = 0; j < 8 / W; j++) {
    const u32 at = byte + j * m;
    if (at < n) bits |= (kv_as_u(codes[at]) >> from & ((1u << W) - 1)) << (j * W);
  }
  return bits;
}

// Packs the codes in `e.x`.
template <u32 BITS> KV_DEV void kv_pack_codes(const KvEncoder& e) {
  const u32 whole = kv_group_bytes(BITS), rest = e.dim % KV_GROUP;
  const u32 in_rest = BITS == 3   ? (rest + 3) / 4 + (rest + 7) / 8
                      : BITS == 4 ? (rest + 1) / 2
                                  : (rest + 1) / 2 + (rest + 3) / 4;
  const u32 all = e.dim / KV_GROUP * whole + in_rest;
  for (u32 i = e.lane; i < all; i += 32) {
    const u32 group = i / whole, byte = i % whole, left = e.dim - group * KV_GROUP;
    const u32 n = left < KV_GROUP ? left : KV_GROUP;
    const float* codes = e.x + group * KV_GROUP;
    const u32 first = BITS == 3 ? (n + 3) / 4 : (n + 1) / 2;  // bytes of the first bit plane
    u32 bits;
    if (BITS == 3)
      bits = byte < first ? kv_plane_byte<2>(codes, n, 0, byte) : kv_plane_byte<1>(codes, n, 2, byte - first);
    else
      bits = byte < first ? kv_plane_byte<4>(codes, n, 0, byte) : kv_plane_byte<2>(codes, n, 4, byte - first);
    e.bytes[i] = (u8)bits;
  }
}

// kv-quant's `pair_sums` of a row: two sums over each magnitude and its level. Eight lanes per
// group, four groups at a time; groups are added in order.
template <u32 BITS> KV_DEV void kv_row_sums(const KvEncoder& e, float inverse, float& projection, float& energy) {
  const u32 k = e.lane % 8, set = e.lane / 8;
  projection = 0.f;
  energy = 0.f;
  for (u32 first = 0; first < e.dim; first += 4 * KV_GROUP) {
    const u32 begin = first + set * KV_GROUP;
    float projected = 0.f, own = 0.f;
#pragma unroll
    for (u32 i = k; i < KV_GROUP; i += 8) {
      if (begin + i >= e.dim) continue;
      const float value = kv_limited(e.x[begin + i]), level = kv_nearest<BITS>(value * inverse);
      projected += value * level;
      own += level * level;
    }
    projected = kv_sum_of_8(projected);
    own = kv_sum_of_8(own);
    if (k == 0) {
      e.parts[2 * set] = projected;
      e.parts[2 * set + 1] = own;
    }
    kv_syncwarp();
    for (u32 s = 0; s < 4 && first + s * KV_GROUP < e.dim; s++) {
      projection += e.parts[2 * s];
      energy += e.parts[2 * s + 1];
    }
    kv_syncwarp();
  }
}

// Encodes a row with one f16 scale.
template <u32 BITS> KV_DEV void kv_encode_lloyd(const KvEncoder& e) {
  u32 bits = 0;
  for (u32 i = e.lane; i < e.dim; i += 32) bits = kv_amax_bits(bits, e.x[i]);
  bits = kv_max_of<16>(bits);
  float energy = 0.f;
  for (u32 i = e.lane % 8; i < e.dim; i += 8) energy += kv_limited(e.x[i]) * kv_limited(e.x[i]);
  energy = kv_sum_of_8(energy);
  if (bits > KV_INFINITY) {
    if (e.lane == 0) kv_put_half(e.bytes + e.scales_begin, KV_F16_NAN);
    return;
  }
  if (energy <= 0.f) return;
  // Tries scales around the probable one, then the one that fits the best codes.
  const float amax = kv_limited(kv_as_f(bits)), rms = kv_sqrt(energy / (float)e.dim);
  const float near = kv_near_scale<BITS>(rms, amax);
  float inverse = 0.f, projection = 0.f, own = 0.f, score = 0.f;
  const u32 tries = BITS == 6 ? 4 : 6;
#pragma unroll 1
  for (u32 i = 0; i < tries; i++) {
    float scale = near;
    if (i + 1 == tries) scale = projection / own;
    else if (i > 0 && BITS == 6) scale = near * (i == 1 ? 0.94f : 1.06f);
    else if (i > 0) scale = near * (i == 1 ? 0.9f : i == 2 ? 0.95f : i == 3 ? 1.05f : 1.1f);
    const float tried = 1.f / scale;
    float tried_projection, tried_own;
    kv_row_sums<BITS>(e, tried, tried_projection, tried_own);
    const float tried_score = tried_projection * (tried_projection / tried_own);
    if (i > 0 && !(tried_score > score)) continue;
    inverse = tried;
    projection = tried_projection;
    own = tried_own;
    score = tried_score;
  }
  const float unbiased = energy / projection;
  const u16 stored = kv_f16_bits(kv_clamp_f16(unbiased));
  const float scale = kv_f16_f(stored);
  // If f16 could not represent the scale, other codes are nearer.
  if (!(kv_abs(scale - unbiased) <= unbiased * 0.001f)) inverse = 1.f / scale;
  if (!(scale > 0.f)) return;  // too small for any scale: all codes are 0
  if (e.lane == 0) kv_put_half(e.bytes + e.scales_begin, stored);
  for (u32 i = e.lane; i < e.dim; i += 32) e.x[i] = kv_as_f(kv_lloyd_code<BITS>(e.x[i], inverse));
  kv_syncwarp();
  kv_pack_codes<BITS>(e);
}

// Results of the scales tried for a group; 16 floats of KvEncoder::parts.
constexpr u32 KV_TRIED = 5;
struct KvTried {
  float near;    // code of the probable scale
  float energy;  // 0 if there is nothing to scale
  float error[KV_TRIED], projection[KV_TRIED];
  float pad[4];
};

// Returns the code of the `i`th scale tried around code `near`; 0 for none.
KV_DEV u32 kv_tried_code(u32 near, u32 i) {
  const u32 code = near + i;  // 2 too large
  return code >= 3 && code <= 0x7e + 2 ? code - 2 : 0;
}

// kv-quant's choice in `group_scale`: by squared error and the error that inner products have
// accumulated.
template <u32 BITS> KV_DEV u32 kv_choose_scale(const KvTried& tried, float& owed) {
  const float weight = BITS == 3 ? 24.f : 4.f;
  const float energy = tried.energy, most = energy * (1.f / 16.f);
  const float above = owed < -most ? -most : owed, carried = above > most ? most : above;
  u32 best = 0;
  float best_cost = kv_as_f(KV_INFINITY);
  owed = carried - energy;
#pragma unroll 1
  for (u32 i = 0; i < KV_TRIED; i++) {
    const u32 code = kv_tried_code((u32)tried.near, i);
    const float owing = carried + tried.projection[i] - energy;
    const float cost = tried.error[i] + weight * owing * (owing / energy);
    if (code == 0 || !(tried.error[i] <= energy && cost <= best_cost)) continue;
    best = code;
    best_cost = cost;
    owed = owing;
  }
  return best;
}

// Encodes a row with an E4M3 scale per 32 values: eight lanes per group, four groups at a time. The
// errors of each scale do not depend on other groups; the choice does, and is made group by group.
template <u32 BITS> KV_DEV void kv_encode_lloyd_groups(const KvEncoder& e) {
  const u32 k = e.lane % 8, set = e.lane / 8;
  KvTried* tried = (KvTried*)e.parts;
  float owed = 0.f;
  for (u32 first = 0; first < e.dim; first += 4 * KV_GROUP) {
    const u32 begin = first + set * KV_GROUP, left = begin < e.dim ? e.dim - begin : 0;
    const u32 n = left < KV_GROUP ? left : KV_GROUP;
    u32 bits = 0;
    float energy = 0.f;
    for (u32 i = k; i < n; i += 8) {
      const float value = e.x[begin + i];
      bits = kv_amax_bits(bits, value);
      energy += kv_limited(value) * kv_limited(value);
    }
    bits = kv_max_of<4>(bits);
    energy = kv_sum_of_8(energy);
    const bool is_nan = bits > KV_INFINITY, live = !is_nan && energy > 0.f;
    const float rms = kv_sqrt(energy / (float)(n > 0 ? n : 1));
    const u32 near = kv_e4m3_encode(kv_near_group_scale<BITS>(rms, kv_limited(kv_as_f(bits))));
    if (k == 0) {
      tried[set].near = (float)near;
      tried[set].energy = live ? energy : 0.f;
    }
#pragma unroll 1
    for (u32 t = 0; t < KV_TRIED; t++) {
      const float scale = kv_e4m3_decode(kv_tried_code(near, t)), inverse = 1.f / scale;
      float error = 0.f, projection = 0.f;
      for (u32 i = k; i < n; i += 8) {
        const float value = kv_limited(e.x[begin + i]), decoded = kv_nearest<BITS>(value * inverse) * scale;
        error += (value - decoded) * (value - decoded);
        projection += value * decoded;
      }
      error = kv_sum_of_8(error);
      projection = kv_sum_of_8(projection);
      if (k == 0) {
        tried[set].error[t] = 0.f + error;
        tried[set].projection[t] = 0.f + projection;
      }
    }
    kv_syncwarp();
    u32 code = 0;
    for (u32 s = 0; s < 4; s++) {
      if (!(tried[s].energy > 0.f)) continue;
      const u32 chosen = kv_choose_scale<BITS>(tried[s], owed);
      code = s == set ? chosen : code;
    }
    kv_syncwarp();
    const float inverse = 1.f / kv_e4m3_decode(code);
    for (u32 i = k; i < n; i += 8)
      e.x[begin + i] = kv_as_f(code > 0 ? kv_lloyd_code<BITS>(e.x[begin + i], inverse) : 0u);
    if (k == 0 && n > 0) e.bytes[e.scales_begin + begin / KV_GROUP] = is_nan ? KV_FP8_NAN : (u8)code;
  }
  kv_syncwarp();
  kv_pack_codes<BITS>(e);
}
