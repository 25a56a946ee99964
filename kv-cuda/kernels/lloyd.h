// Codebooks of the Lloyd-Max formats: kv-quant's lloyd.rs, on the device.
#pragma once
#include "minifloat.h"

KV_TABLE float KV_L3[4] = {0.24509418f, 0.7560053f, 1.3439093f, 2.1519456f};
KV_TABLE float KV_L4[8] = {0.12839504f, 0.3880483f, 0.65675914f, 0.94234043f,
                           1.2562312f,  1.6180464f, 2.0690172f,  2.7325895f};
KV_TABLE float KV_L6[32] = {
    0.033409506f, 0.10027829f, 0.1672969f, 0.23456699f, 0.30219284f, 0.37028265f, 0.43894967f, 0.5083138f,
    0.578503f,    0.6496556f,  0.7219219f, 0.7954677f,  0.8704766f,  0.94715494f, 1.0257363f,  1.1064882f,
    1.1897202f,   1.2757945f,  1.365141f,  1.4582764f,  1.5558312f,  1.6585889f,  1.7675419f,  1.8839773f,
    2.009611f,    2.1468103f,  2.2989812f, 2.471305f,   2.6722739f,  2.9174068f,  3.240437f,   3.7441013f};

// Codes packed together.
constexpr u32 KV_GROUP = 32;

// Bytes of a whole group of codes of `bits` bits.
constexpr u32 kv_group_bytes(u32 bits) { return bits == 3 ? 12 : bits == 4 ? 16 : 24; }

// The magnitude of a code of `BITS` bits, its sign on top.
template <u32 BITS> KV_DEV float kv_level(u32 code) {
  const float* levels = BITS == 3 ? KV_L3 : BITS == 4 ? KV_L4 : KV_L6;
  const float magnitude = levels[code & ((1u << (BITS - 1)) - 1)];
  return kv_as_f(kv_as_u(magnitude) | (code >> (BITS - 1) & 1) << 31);
}
