// Codebooks of the Lloyd-Max formats: kv-quant's lloyd.rs, on the device.
#pragma once
#include "minifloat.h"

template <u32 N> struct KvLevels { float at[N]; };

constexpr KvLevels<4> KV_BOOK3 = {{0.24509418f, 0.7560053f, 1.3439093f, 2.1519456f}};
constexpr KvLevels<8> KV_BOOK4 = {
    {0.12839504f, 0.3880483f, 0.65675914f, 0.94234043f, 1.2562312f, 1.6180464f, 2.0690172f, 2.7325895f}};
constexpr KvLevels<32> KV_BOOK6 = {
    {0.033409506f, 0.10027829f, 0.1672969f, 0.23456699f, 0.30219284f, 0.37028265f, 0.43894967f, 0.5083138f,
     0.578503f,    0.6496556f,  0.7219219f, 0.7954677f,  0.8704766f,  0.94715494f, 1.0257363f,  1.1064882f,
     1.1897202f,   1.2757945f,  1.365141f,  1.4582764f,  1.5558312f,  1.6585889f,  1.7675419f,  1.8839773f,
     2.009611f,    2.1468103f,  2.2989812f, 2.471305f,   2.6722739f,  2.9174068f,  3.240437f,   3.7441013f}};

// Magnitudes in ascending order.
KV_TABLE KvLevels<4> KV_L3 = KV_BOOK3;
KV_TABLE KvLevels<8> KV_L4 = KV_BOOK4;
KV_TABLE KvLevels<32> KV_L6 = KV_BOOK6;

// Decision thresholds: halfway between magnitudes, rounded once.
constexpr float kv_between(float low, float high) { return (float)(((double)low + (double)high) / 2); }
template <u32 N> constexpr KvLevels<N - 1> kv_thresholds(const KvLevels<N>& book) {
  KvLevels<N - 1> list = {};
  for (u32 i = 0; i + 1 < N; i++) list.at[i] = kv_between(book.at[i], book.at[i + 1]);
  return list;
}
KV_TABLE KvLevels<3> KV_L3_THRESHOLDS = kv_thresholds(KV_BOOK3);
KV_TABLE KvLevels<7> KV_L4_THRESHOLDS = kv_thresholds(KV_BOOK4);

// The thresholds of l6 by position: cells of width 1/16 around each multiple of 1/16, with at most
// one threshold each.
struct KvCells {
  float inside[64];  // the threshold in the cell, or a number above all values
  u8 below[64];      // number of thresholds below the cell
};
constexpr KvCells kv_cells(const KvLevels<31>& thresholds) {
  KvCells cells = {};
  for (u32 cell = 0; cell < 64; cell++) {
    const float begin = ((float)cell - 0.5f) / 16.f, end = ((float)cell + 0.5f) / 16.f;
    cells.inside[cell] = 3e38f;
    for (u32 i = 0; i < 31; i++) {
      if (thresholds.at[i] < begin) cells.below[cell]++;
      else if (thresholds.at[i] <= end) cells.inside[cell] = thresholds.at[i];
    }
  }
  return cells;
}
KV_TABLE KvCells KV_L6_CELLS = kv_cells(kv_thresholds(KV_BOOK6));

// Codes that are packed together.
constexpr u32 KV_GROUP = 32;

// Returns the bytes of a whole group of `bits`-bit codes.
constexpr u32 kv_group_bytes(u32 bits) { return bits == 3 ? 12 : bits == 4 ? 16 : 24; }

// Returns the magnitude of an index; higher bits are ignored.
template <u32 BITS> KV_DEV float kv_magnitude(u32 index) {
  const float* levels = BITS == 3 ? KV_L3.at : BITS == 4 ? KV_L4.at : KV_L6.at;
  return levels[index & ((1u << (BITS - 1)) - 1)];
}

// Returns the level of a code of `BITS` bits, of which the top one is the sign.
template <u32 BITS> KV_DEV float kv_level(u32 code) {
  return kv_as_f(kv_as_u(kv_magnitude<BITS>(code)) | (code >> (BITS - 1) & 1) << 31);
}

// Returns the index of the magnitude nearest to `value`, which is not negative; on a threshold the
// smaller one. NaN gives the first index, in l6 the last, as on the host.
template <u32 BITS> KV_DEV u32 kv_nearest_index(float value) {
  if (BITS == 6) {
    const float inside = value < 4.f ? value : 4.f, scaled = inside * 16.f;
    // Adding 2^23 rounds to the nearest cell.
    const u32 cell = kv_as_u((scaled < 63.f ? scaled : 63.f) + 8388608.f) % 64;
    return KV_L6_CELLS.below[cell] + (inside > KV_L6_CELLS.inside[cell] ? 1u : 0u);
  }
  u32 below = 0;
#pragma unroll
  for (u32 i = 0; i < (BITS == 3 ? 3 : 7); i++)
    below += value > (BITS == 3 ? KV_L3_THRESHOLDS.at : KV_L4_THRESHOLDS.at)[i] ? 1 : 0;
  return below;
}
