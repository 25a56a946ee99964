// Encoding of f32 values to stored rows: kv-quant's row.rs, on the device. The results are the same
// bit for bit, except for the payload of a NaN in an unquantised row. Sums are taken in kv-quant's
// order, so units that include this must be compiled with `--fmad=false`.
//
// One warp encodes one row. All 32 lanes call with the same arguments; values must be synchronised
// before.
#pragma once
#include "encode_lloyd.h"
#include "rows.h"

// One-byte codes with a scale: kv-quant's scaled.rs.
enum KvByte : u32 { KV_BYTE_E4M3, KV_BYTE_E5M2, KV_BYTE_INT8 };

KV_DEV u8 kv_byte_encode(KvByte kind, float value) {
  if (kind == KV_BYTE_E4M3) return kv_e4m3_encode(value);
  return kind == KV_BYTE_E5M2 ? kv_e5m2_encode(value) : kv_int8_encode(value);
}

KV_DEV void kv_encode_given(KvByte kind, float inv_scale, const KvEncoder& e) {
  for (u32 i = e.lane; i < e.dim; i += 32) e.bytes[i] = kv_byte_encode(kind, e.x[i] * inv_scale);
}

// Returns the scale that maps the largest magnitude to the code worth `largest`, as f16: rounded to
// nearest, but up where f16 is subnormal, so that nothing is clipped.
KV_DEV u16 kv_scale_from_amax(float amax, float largest) {
  const float scale = amax / largest;
  const u16 stored = kv_f16_bits(kv_clamp_f16(scale));
  const bool clips = stored < 0x0400 && kv_f16_f(stored) < scale;
  return (u16)(stored + (clips ? 1 : 0));
}

KV_DEV void kv_encode_own(KvByte kind, const KvEncoder& e) {
  u32 amax = 0;
  for (u32 i = e.lane; i < e.dim; i += 32) amax = kv_amax_bits(amax, e.x[i]);
  amax = kv_max_of<16>(amax);
  const float largest = kind == KV_BYTE_E4M3 ? 448.f : kind == KV_BYTE_E5M2 ? 57344.f : 127.f;
  const bool is_nan = amax > KV_INFINITY;
  const u16 stored = is_nan ? KV_F16_NAN : kv_scale_from_amax(kv_as_f(amax), largest);
  const float scale = kv_f16_f(stored);
  if (e.lane == 0) kv_put_half(e.bytes + e.scales_begin, stored);
  if (!(scale > 0.f)) return;  // all codes are 0
  for (u32 i = e.lane; i < e.dim; i += 32) e.bytes[i] = kv_byte_encode(kind, e.x[i] / scale);
}

// Stores a scale and returns the factor for values, which ggml computes from the scale before
// rounding. kv-quant's ggml.rs describes the differences to ggml.
KV_DEV float kv_put_ggml_scale(float scale, u8* to, u32 lane) {
  const u16 nearest = kv_f16_bits(scale);
  const bool saturates = (nearest & 0x7fff) == 0x7c00;
  const u16 stored = saturates ? kv_f16_bits(kv_clamp_f16(scale)) : nearest;
  if (lane == 0) kv_put_half(to, stored);
  const float inverse = 1.f / (saturates ? kv_f16_f(stored) : scale);
  return (kv_as_u(inverse) & 0x7fffffffu) < KV_INFINITY ? inverse : 0.f;
}

// Returns the nearest integer in -127..=127, halves away from zero.
KV_DEV u8 kv_round_half_away(float value) {
  const float rounder = 8388608.f;
  const float whole = kv_abs(value), magnitude = whole < 127.f ? whole : 127.f;
  const float even = (magnitude + rounder) - rounder;
  const float rounded = magnitude - even >= 0.5f ? even + 1.f : even;
  const u32 code = kv_as_u(rounded + rounder);
  return (u8)(kv_as_u(value) >> 31 ? 0u - code : code);
}

KV_DEV u32 kv_q4_0_code(float value, float inverse) {
  const float code = value * inverse + 8.5f;
  // Clamp and conversion turn NaN into 0, as on the host.
  return code > 15.f ? 15 : code > 0.f ? (u32)code : 0;
}

// Encodes a block of q8_0, one value per lane, to 34 bytes.
KV_DEV void kv_encode_q8_0(float value, u8* block, u32 lane) {
  const u32 amax = kv_max_of<16>(kv_amax_bits(0, value));
  const bool is_nan = amax > KV_INFINITY;
  if (is_nan && lane == 0) kv_put_half(block, KV_F16_NAN);
  const float inverse = is_nan ? 0.f : kv_put_ggml_scale(kv_as_f(amax) / 127.f, block, lane);
  block[2 + lane] = is_nan ? 0 : kv_round_half_away(value * inverse);
}

// llama.cpp's blocks of 32, one value per lane.
KV_DEV void kv_encode_ggml(bool nibbles, const KvEncoder& e) {
  const u32 lane = e.lane;
  u8* block = e.bytes;
  for (u32 begin = 0; begin < e.dim; begin += 32, block += nibbles ? 18 : 34) {
    const float value = begin + lane < e.dim ? e.x[begin + lane] : 0.f;
    if (!nibbles) {
      kv_encode_q8_0(value, block, lane);
      continue;
    }
    const u32 amax = kv_max_of<16>(kv_amax_bits(0, value));
    // The first value of the largest magnitude, with its sign, becomes -8.
    const bool is_largest = amax > 0 && (kv_as_u(value) & 0x7fffffffu) >= amax;
    const u32 first = 31 - kv_max_of<16>(is_largest ? 31 - lane : 0);
    const bool is_nan = amax > KV_INFINITY;
    if (is_nan) {
      if (lane == 0) kv_put_half(block, KV_F16_NAN);
      continue;
    }
    const float extreme = amax > 0 ? e.x[begin + first] : 0.f;
    const float inverse = kv_put_ggml_scale(extreme / -8.f, block, lane);
    if (lane < 16) {
      const float high = begin + lane + 16 < e.dim ? e.x[begin + lane + 16] : 0.f;
      block[2 + lane] = (u8)(kv_q4_0_code(value, inverse) | kv_q4_0_code(high, inverse) << 4);
    }
  }
}

// Returns the value of the nearest E2M1 code.
KV_DEV float kv_e2m1_round(float value) {
  const float rounder = 4194304.f;
  const float whole = kv_abs(value), magnitude = whole < 6.f ? whole : 6.f;
  const u32 bits = kv_as_u(magnitude);
  const u32 kept = (bits + (1u << 21) - 1 + (bits >> 22 & 1)) >> 22 << 22;
  const float subnormal = (magnitude + rounder) - rounder;
  const u32 rounded = magnitude < 1.f ? kv_as_u(subnormal) : kept;
  return kv_as_f((rounded & 0x7fffffffu) | (kv_as_u(value) & 0x80000000u));
}

// Returns the squared error of an NVFP4 block at a scale, relative to its largest value. `count` of
// this lane's two values exist.
KV_DEV float kv_nvfp4_error(u8 code, const float (&values)[2], u32 count, float inv_scale, float unit) {
  const float scale = kv_e4m3_decode(code);
  float sum = 0.f;
#pragma unroll
  for (u32 i = 0; i < 2; i++) {
    const float value = values[i] * inv_scale;
    const float decoded = scale > 0.f ? kv_e2m1_round(value / scale) * scale : 0.f;
    const float error = (value - decoded) * unit;
    if (i < count) sum += error * error;
  }
  return kv_sum_of_8(sum);
}

// Eight lanes per block of 16, four blocks at a time.
KV_DEV void kv_encode_nvfp4(float inv_scale, const KvEncoder& e) {
  const u32 k = e.lane % 8, set = e.lane / 8, blocks = (e.dim + 15) / 16;
  for (u32 first = 0; first < blocks; first += 4) {
    const u32 begin = (first + set) * 16 + k;
    const u32 count = begin + 8 < e.dim ? 2 : begin < e.dim ? 1 : 0;
    float values[2] = {count > 0 ? e.x[begin] : 0.f, count > 1 ? e.x[begin + 8] : 0.f};
    const u32 bits = kv_max_of<4>(kv_amax_bits(kv_amax_bits(0, values[0]), values[1]));
    const float amax = kv_as_f(bits), unit = 1.f / (amax * inv_scale);
    const u8 over_6 = kv_e4m3_encode(amax / 6.f * inv_scale), over_4 = kv_e4m3_encode(amax / 4.f * inv_scale);
    const float error_6 = kv_nvfp4_error(over_6, values, count, inv_scale, unit);
    const float error_4 = kv_nvfp4_error(over_4, values, count, inv_scale, unit);
    const float error_1 = kv_nvfp4_error(1, values, count, inv_scale, unit);
    const float error_0 = kv_nvfp4_error(0, values, count, inv_scale, unit);
    // Errors are NaN if the largest value is infinite or zero: then the scale over 6 is used.
    const u8 best = error_4 < error_6 ? over_4 : over_6;
    const u8 code = bits > KV_INFINITY ? KV_FP8_NAN : best == 0 && error_1 < error_0 ? 1 : best;
    const float scale = kv_e4m3_decode(code);
    // Replaces values by codes.
#pragma unroll
    for (u32 i = 0; i < 2; i++)
      if (i < count) e.x[begin + 8 * i] = kv_as_f(scale > 0.f ? kv_e2m1_encode(values[i] * inv_scale / scale) : 0u);
    if (k == 0 && count > 0) e.bytes[e.scales_begin + first + set] = code;
  }
  kv_syncwarp();
  for (u32 i = e.lane; i < (e.dim + 1) / 2; i += 32) {
    const u32 high = 2 * i + 1 < e.dim ? kv_as_u(e.x[2 * i + 1]) : 0;
    e.bytes[i] = (u8)(kv_as_u(e.x[2 * i]) | high << 4);
  }
}

// The shared memory of a warp's encoder. It begins with the 4 * dim bytes of the values and has,
// each rounded up to 16, 4 * dim, KV_PARTS * 4 and row_bytes bytes.
KV_DEV u32 kv_round16(u32 bytes) { return (bytes + 15) / 16 * 16; }
KV_DEV KvEncoder kv_encoder(u8* shared, u32 dim, u32 lane) {
  float* parts = (float*)(shared + kv_round16(4 * dim));
  return {(float*)shared, parts, (u8*)(parts + KV_PARTS), dim, 0, lane};
}

// Encodes `e.x`, which is overwritten, to the codes at `to`: `row_bytes` bytes, 2-byte aligned.
// Rows in 16 bits use kv_encode_wide. On return the scratch memory may be reused.
KV_DEV void kv_encode_codes(u32 format, u32 row_bytes, u32 scales_begin, float inv_scale, KvEncoder e, u8* to) {
  e.scales_begin = scales_begin;
  for (u32 i = e.lane; i < row_bytes; i += 32) e.bytes[i] = 0;
  kv_syncwarp();
  switch (format) {
    case KV_FMT_E4M3: case KV_FMT_E4M3_HEAD: kv_encode_given(KV_BYTE_E4M3, inv_scale, e); break;
    case KV_FMT_E5M2: case KV_FMT_E5M2_HEAD: kv_encode_given(KV_BYTE_E5M2, inv_scale, e); break;
    case KV_FMT_INT8: case KV_FMT_INT8_HEAD: kv_encode_given(KV_BYTE_INT8, inv_scale, e); break;
    case KV_FMT_E4M3_ROW: kv_encode_own(KV_BYTE_E4M3, e); break;
    case KV_FMT_E5M2_ROW: kv_encode_own(KV_BYTE_E5M2, e); break;
    case KV_FMT_INT8_ROW: kv_encode_own(KV_BYTE_INT8, e); break;
    case KV_FMT_L6: kv_encode_lloyd<6>(e); break;
    case KV_FMT_L4: kv_encode_lloyd<4>(e); break;
    case KV_FMT_L3: kv_encode_lloyd<3>(e); break;
    case KV_FMT_L6_G32: kv_encode_lloyd_groups<6>(e); break;
    case KV_FMT_L4_G32: kv_encode_lloyd_groups<4>(e); break;
    case KV_FMT_L3_G32: kv_encode_lloyd_groups<3>(e); break;
    case KV_FMT_Q8_0: kv_encode_ggml(false, e); break;
    case KV_FMT_Q4_0: kv_encode_ggml(true, e); break;
    case KV_FMT_NVFP4: kv_encode_nvfp4(inv_scale, e); break;
    default: kv_unknown_format(format);
  }
  kv_syncwarp();
  for (u32 i = e.lane; i < row_bytes / 2; i += 32) ((u16*)to)[i] = ((const u16*)e.bytes)[i];
  kv_syncwarp();
}

// Stores values in 16 bits among codes.
KV_DEV void kv_encode_wide(const float* x, u32 dim, u8* to, u32 lane) {
  for (u32 i = lane; i < dim; i += 32) ((u16*)to)[i] = kv_f16_bits(kv_clamp_f16(x[i]));
}
