// Conversions of 16-bit and 8-bit numbers on the host, rounded like the GPU: to nearest, ties to
// even.
#pragma once
#include <cmath>
#include <cstring>

namespace kvemu {

inline float as_float(u32 bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline u32 as_bits(float f) { u32 bits; std::memcpy(&bits, &f, 4); return bits; }

inline float half_to_float(u16 half) {
  const u32 sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, mantissa = half & 1023u;
  if (exponent == 31) return as_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent > 0) return as_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
  return as_float(sign | as_bits(float(mantissa) * 0x1p-24f));
}

inline u16 float_to_half(float value) {
  const u32 bits = as_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;                  // cvt gives this NaN, without the sign
  if (magnitude >= 0x477ff000u) return u16(sign | 0x7c00u);    // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {                               // below the smallest normal number
    return u16(sign | u32(std::nearbyint(as_float(magnitude) * 0x1p24f)));
  }
  const u32 rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return u16(sign | ((rounded - 0x38000000u) >> 13));
}

inline float bf16_to_float(u16 bf16) { return as_float(u32(bf16) << 16); }

inline u16 float_to_bf16(float value) {
  const u32 bits = as_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float e4m3_to_float(u8 code) {
  const u32 exponent = (code >> 3) & 15u, mantissa = code & 7u;
  float magnitude;
  if (exponent == 15 && mantissa == 7) magnitude = as_float(0x7fc00000u);
  else if (exponent > 0) magnitude = std::ldexp(1.0f + float(mantissa) / 8.0f, int(exponent) - 7);
  else magnitude = std::ldexp(float(mantissa), -9);
  return code & 0x80 ? -magnitude : magnitude;
}

}  // namespace kvemu
