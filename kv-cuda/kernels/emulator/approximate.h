// ex2.approx.ftz, lg2.approx.ftz, rcp.approx.ftz and the sums of tensor cores, as inexact as a card
// may be.
//
// The PTX manual bounds the errors of the approximate instructions but does not specify them. The
// emulator derives an error within the bound from the bits of the argument: equal arguments give
// equal results, and neighbours differ. A kernel that passes here relies on nothing but the
// manual's guarantees.
#pragma once
#include <cmath>

#include "numbers.h"

namespace kvemu {

// Bounds of the manual: relative, except for lg2 between 0.5 and 2, where its bound is absolute.
constexpr double EX2_ERROR = 0x1p-22, LG2_ERROR = 0x1p-22, RCP_ERROR = 0x1p-23;

// `.ftz`: flushes a subnormal number to a zero of the same sign.
inline float flush(float x) {
  const u32 bits = as_bits(x);
  return (bits & 0x7f800000u) == 0 ? as_float(bits & 0x80000000u) : x;
}

// Hashes the argument to a number from -1 to 1.
inline double error_of(float x, u32 salt) {
  u32 h = (as_bits(x) * 0x9e3779b1u) ^ (salt * 0x85ebca6bu);
  h ^= h >> 15, h *= 0x2c1b3c6du, h ^= h >> 12, h *= 0x297a2d39u, h ^= h >> 15;
  return double(h) * (2.0 / 4294967295.0) - 1.0;
}

// Returns `exact` with `part` of the largest error, in f32. Rounding to f32 does not exceed the
// bound.
inline float inexact(double exact, double bound, double part) {
  float result = float(exact + bound * part);
  if (std::fabs(double(result) - exact) > bound) result = std::nextafter(result, float(exact));
  return flush(result);
}

// Infinities, NaN and the power of zero are exact in the manual.
inline float ex2_approx(float x) {
  const float in = flush(x);
  const double exact = std::exp2(double(in));
  if (in == 0.f || !(exact > 0.0 && exact < 0x1p128)) return float(exact);
  return inexact(exact, exact * EX2_ERROR, error_of(x, 1));
}

// The logarithm of zero is minus infinity, that of a negative number NaN.
inline float lg2_approx(float x) {
  const float in = flush(x);
  const double exact = std::log2(double(in));
  if (!std::isfinite(exact)) return float(exact);
  const double bound = in > 0.5f && in < 2.f ? LG2_ERROR : std::fabs(exact) * LG2_ERROR;
  return inexact(exact, bound, error_of(x, 2));
}

// Zeros and infinities are exact, with their signs.
inline float rcp_approx(float x) {
  const double exact = 1.0 / double(flush(x));
  if (exact == 0.0 || !std::isfinite(exact)) return float(exact);
  return inexact(exact, std::fabs(exact) * RCP_ERROR, error_of(x, 3));
}

// Returns the sum of exact products and the addend as a tensor core computes it: all terms are
// aligned to the largest and truncated one bit below its f32 precision, the sum of the rest is
// exact and truncated to f32. Nothing is rounded to nearest. Measured on cards by Fasi, Higham,
// Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores" (2021); later cards keep a bit
// or two more.
template <u32 N> float tensor_sum(const double (&terms)[N]) {
  double largest = 0.0, plain = 0.0;
  bool is_finite = true;
  for (const double term : terms) {
    is_finite = is_finite && std::isfinite(term);
    const double magnitude = std::fabs(term);
    if (magnitude > largest) largest = magnitude;  // faster than fmax; a NaN is not finite
    plain += term;
  }
  if (!is_finite || largest == 0.0) return float(plain);
  int exponent;
  std::frexp(largest, &exponent);
  // Powers of two: a division by the unit is exact.
  const double unit = std::ldexp(1.0, exponent - 25), units = std::ldexp(1.0, 25 - exponent);
  double sum = 0.0;
  for (const double term : terms) sum += std::trunc(term * units);
  sum *= unit;
  const float nearest = float(sum);
  const bool is_past = std::fabs(double(nearest)) > std::fabs(sum) && std::fabs(sum) < 0x1p128;
  return is_past ? std::nextafter(nearest, 0.f) : nearest;
}

}  // namespace kvemu
