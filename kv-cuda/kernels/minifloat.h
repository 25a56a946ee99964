// Conversions of 16, 8 and 4-bit floats: kv-quant's minifloat.rs, on the device. Do not compile
// with `-ftz=true`: small codes pass through subnormal numbers.
#pragma once
#include "dev.h"

KV_DEV float kv_abs(float x) { return kv_as_f(kv_as_u(x) & 0x7fffffffu); }
KV_DEV bool kv_is_nan(float x) { return (kv_as_u(x) & 0x7fffffffu) > 0x7f800000u; }

constexpr u32 KV_NAN = 0x7fc00000u;
constexpr u8 KV_FP8_NAN = 0x7f;
constexpr u16 KV_F16_NAN = 0x7e00;

KV_DEV float kv_e4m3_decode(u32 code) {
  // Moves the fields to their binary32 places and corrects the bias by a multiplication: exact.
  const float magnitude = kv_as_f((code & 0x7f) << 20) * kv_as_f((127 + 120) << 23);
  const u32 bits = (code & 0x7f) == 0x7f ? KV_NAN : kv_as_u(magnitude);
  return kv_as_f(bits | (code & 0x80) << 24);
}

// E5M2 is the upper byte of an f16.
KV_DEV float kv_e5m2_decode(u32 code) { return kv_f16_f((u16)(code << 8)); }

// Decodes the low 4 bits.
KV_DEV float kv_e2m1_decode(u32 code) {
  const float magnitude = kv_as_f((code & 7) << 22) * kv_as_f((127 + 126) << 23);
  return kv_as_f(kv_as_u(magnitude) | (code & 8) << 28);
}

// minifloat.rs's `magnitude`: the code of |value|, saturated at `largest`, ties to even.
template <u32 MANTISSA, u32 BIAS> KV_DEV u32 kv_minifloat(float value, float largest) {
  constexpr u32 dropped = 23 - MANTISSA, rounder = (127 + 23 + 1 - BIAS - MANTISSA) << 23;
  const float smallest_normal = kv_as_f((127 + 1 - BIAS) << 23);
  const float whole = kv_abs(value), inside = whole < largest ? whole : largest;
  const u32 subnormal = kv_as_u(inside + kv_as_f(rounder)) - rounder, bits = kv_as_u(inside);
  const u32 nearest = bits + ((1u << (dropped - 1)) - 1) + (bits >> dropped & 1);
  const u32 normal = (nearest >> dropped) - ((127 - BIAS) << MANTISSA);
  return inside < smallest_normal ? subnormal : normal;
}

KV_DEV u8 kv_e4m3_encode(float value) {
  const u32 code = kv_minifloat<3, 7>(value, 448.f) | kv_as_u(value) >> 31 << 7;
  return kv_is_nan(value) ? KV_FP8_NAN : (u8)code;
}

// Saturates instead of becoming infinite.
KV_DEV u8 kv_e5m2_encode(float value) {
  const u32 code = kv_minifloat<2, 15>(value, 57344.f) | kv_as_u(value) >> 31 << 7;
  return kv_is_nan(value) ? KV_FP8_NAN : (u8)code;
}

// NaN, which has no code, becomes 6.
KV_DEV u8 kv_e2m1_encode(float value) {
  const u32 code = kv_minifloat<1, 1>(value, 6.f) | kv_as_u(value) >> 31 << 3;
  return kv_is_nan(value) ? 7 : (u8)code;
}

// Encodes -127..=127, ties to even; NaN becomes 0.
KV_DEV u8 kv_int8_encode(float value) {
  const float rounder = 12582912.f;  // 1.5 * 2^23: moves the integer to the low bits of the sum
  const float number = kv_is_nan(value) ? 0.f : value;
  const float below = number < 127.f ? number : 127.f;
  const float inside = below > -127.f ? below : -127.f;
  return (u8)kv_as_u(inside + rounder);
}

// Returns the bits of the nearest f16, ties to even; infinity beyond 65504.
KV_DEV u16 kv_f16_bits(float value) { return (u16)kv_pack(KvF16(), value, 0.f); }

// Clamps to 65504 in magnitude; NaN stays.
KV_DEV float kv_clamp_f16(float value) {
  const float above = value < -65504.f ? -65504.f : value;
  return above > 65504.f ? 65504.f : above;
}

// kv-quant's `block::round_wide`: the value that a row in 16 bits holds.
KV_DEV float kv_round_wide(float value) { return kv_f16_f(kv_f16_bits(kv_clamp_f16(value))); }
