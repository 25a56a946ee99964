// Decoding of stored rows: kv-quant's row.rs, on the device. The results are the same bit for bit,
// except for the payload of a NaN. Encoding is in encode.h.
//
// A value is a level times the factor of its row. If a row has one scale, the factor is that scale,
// so a kernel can sum levels and multiply once. If 16 or 32 values share a scale, levels include it
// and the factor is 1.
//
//   kv_value(format, row, scales_begin, dim, scale, i)                one value
//   kv_values<N>(format, row, scales_begin, dim, scale, begin, out)   N consecutive values
//   kv_factor(format, row, scales_begin, scale)                       the factor of the row
//   kv_levels<N>(format, row, scales_begin, dim, scale, begin, out)   N consecutive levels
//
// `row` is 2-byte aligned (4-byte for f32), in any memory. `scales_begin` and `dim` belong to the
// plane; `scale` is the calibrated scale of the plane and head (1 if there is none). N is 8 or 32,
// and `begin` a multiple of it. Values from `dim` on are 0, and their bytes are not read. There is
// one switch over the format per run of N; a constant format removes it. Rows kept in 16 bits are
// read with KV_FMT_F16.
// Wide rows are f16: kv_values with KV_FMT_F16.
#pragma once
#include "lloyd.h"
#include "rows.h"

// Reads two bytes of a row, at an even offset.
KV_DEV u32 kv_pair(const u8* at) { return *(const u16*)at; }
KV_DEV float kv_half_at(const u8* at) { return kv_f16_f((u16)kv_pair(at)); }

// Extracts the `W` bits of code `at` from a bit plane of `n` codes: docs/formats.md.
template <u32 W> KV_DEV u32 kv_plane_bits(const u8* plane, u32 n, u32 at) {
  const u32 per_byte = 8 / W, m = (n + per_byte - 1) / per_byte;
  return plane[at % m] >> (at / m * W) & ((1u << W) - 1);
}

// Extracts code `at` of a group of `n`.
template <u32 BITS> KV_DEV u32 kv_group_code(const u8* group, u32 n, u32 at) {
  if (BITS == 3) return kv_plane_bits<2>(group, n, at) | kv_plane_bits<1>(group + (n + 3) / 4, n, at) << 2;
  const u32 low = kv_plane_bits<4>(group, n, at);
  return BITS == 4 ? low : low | kv_plane_bits<2>(group + (n + 1) / 2, n, at) << 4;
}

template <u32 BITS> KV_DEV float kv_lloyd_level(const u8* row, u32 dim, u32 i) {
  const u32 first = i / KV_GROUP * KV_GROUP, left = dim - first;
  const u8* group = row + i / KV_GROUP * kv_group_bytes(BITS);
  return kv_level<BITS>(kv_group_code<BITS>(group, left < KV_GROUP ? left : KV_GROUP, i - first));
}

// Decodes one level of a row.
KV_DEV float kv_level_at(u32 format, const u8* row, u32 scales_begin, u32 dim, float scale, u32 i) {
  const u8* scales = row + scales_begin;
  switch (format) {
    case KV_FMT_F32: return ((const float*)row)[i];
    case KV_FMT_F16: return kv_half_at(row + 2 * i);
    case KV_FMT_BF16: return kv_bf16_f((u16)kv_pair(row + 2 * i));
    case KV_FMT_E4M3: case KV_FMT_E4M3_HEAD: case KV_FMT_E4M3_ROW: return kv_e4m3_decode(row[i]);
    case KV_FMT_E5M2: case KV_FMT_E5M2_HEAD: case KV_FMT_E5M2_ROW: return kv_e5m2_decode(row[i]);
    case KV_FMT_INT8: case KV_FMT_INT8_HEAD: case KV_FMT_INT8_ROW: return (float)(i8)row[i];
    case KV_FMT_L6: return kv_lloyd_level<6>(row, dim, i);
    case KV_FMT_L4: return kv_lloyd_level<4>(row, dim, i);
    case KV_FMT_L3: return kv_lloyd_level<3>(row, dim, i);
    case KV_FMT_L6_G32: return kv_lloyd_level<6>(row, dim, i) * kv_e4m3_decode(scales[i / 32]);
    case KV_FMT_L4_G32: return kv_lloyd_level<4>(row, dim, i) * kv_e4m3_decode(scales[i / 32]);
    case KV_FMT_L3_G32: return kv_lloyd_level<3>(row, dim, i) * kv_e4m3_decode(scales[i / 32]);
    case KV_FMT_Q8_0: {
      const u8* block = row + i / 32 * 34;
      return (float)(i8)block[2 + i % 32] * kv_half_at(block);
    }
    case KV_FMT_Q4_0: {
      const u8* block = row + i / 32 * 18;
      const u32 code = block[2 + i % 16] >> (i / 16 % 2 * 4) & 15;
      return ((float)code - 8.f) * kv_half_at(block);
    }
    case KV_FMT_NVFP4: {
      const u32 code = row[i / 2] >> (i % 2 * 4);
      return kv_e2m1_decode(code) * (kv_e4m3_decode(scales[i / 16]) * scale);
    }
    default: kv_unknown_format(format);
  }
}

KV_DEV float kv_factor(u32 format, const u8* row, u32 scales_begin, float scale) {
  switch (format) {
    case KV_FMT_E4M3: case KV_FMT_E4M3_HEAD: case KV_FMT_E5M2: case KV_FMT_E5M2_HEAD:
    case KV_FMT_INT8: case KV_FMT_INT8_HEAD:
      return scale;
    case KV_FMT_E4M3_ROW: case KV_FMT_E5M2_ROW: case KV_FMT_INT8_ROW:
    case KV_FMT_L6: case KV_FMT_L4: case KV_FMT_L3:
      return kv_half_at(row + scales_begin);
    default: return 1.f;
  }
}

KV_DEV float kv_value(u32 format, const u8* row, u32 scales_begin, u32 dim, float scale, u32 i) {
  return kv_level_at(format, row, scales_begin, dim, scale, i) * kv_factor(format, row, scales_begin, scale);
}

// Eight bytes in registers.
struct KvBytes8 {
  u32 word[2];
  KV_DEV u32 byte(u32 i) const { return word[i / 4] >> (i % 4 * 8) & 0xff; }
};

// Reads eight bytes at an even address: by one load if the address is aligned, otherwise by three.
KV_DEV KvBytes8 kv_bytes8(const u8* at) {
  if (((u64)at & 7) == 0) {
    const u64 all = *(const u64*)at;
    return {{(u32)all, (u32)(all >> 32)}};
  }
  // The aligned four bytes are the first or the middle ones; the rest is read two by two.
  const bool middle = ((u64)at & 2) != 0;
  const u32 four = *(const u32*)(middle ? at + 2 : at), two = kv_pair(middle ? at : at + 4), last = kv_pair(at + 6);
  return {{middle ? two | four << 16 : four, (middle ? four >> 16 : two) | last << 16}};
}

// Decodes codes `at..at + 8` of a whole group.
template <u32 BITS> KV_DEV void kv_levels8_lloyd(const u8* group, u32 at, float* out) {
  if (BITS == 3) {
    const KvBytes8 low = kv_bytes8(group);
    const u32 signs = kv_pair(group + 8) | kv_pair(group + 10) << 16;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
      const u32 sign = signs >> (i % 4 * 8 + at / 4 + i / 4) & 1;
      out[i] = kv_level<3>((low.byte(i) >> (at / 8 * 2) & 3) | sign << 2);
    }
    return;
  }
  const KvBytes8 low = kv_bytes8(group + at % 16);
  const KvBytes8 high = BITS == 6 ? kv_bytes8(group + 16) : low;
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    const u32 nibble = low.byte(i) >> (at / 16 * 4) & 15;
    out[i] = kv_level<BITS>(BITS == 6 ? nibble | (high.byte(i) >> (at / 8 * 2) & 3) << 4 : nibble);
  }
}

template <u32 BITS, u32 N> KV_DEV void kv_run_lloyd(const u8* row, u32 begin, float factor, float (&out)[N]) {
  const u8* group = row + begin / KV_GROUP * kv_group_bytes(BITS);
#pragma unroll
  for (u32 i = 0; i < N; i += 8) kv_levels8_lloyd<BITS>(group, begin % KV_GROUP + i, out + i);
#pragma unroll
  for (u32 i = 0; i < N; i++) out[i] *= factor;
}

// Decodes one-byte codes.
template <u32 N, class Decode> KV_DEV void kv_run_bytes(const u8* at, float (&out)[N], Decode decode) {
#pragma unroll
  for (u32 i = 0; i < N; i += 8) {
    const KvBytes8 codes = kv_bytes8(at + i);
#pragma unroll
    for (u32 j = 0; j < 8; j++) out[i + j] = decode(codes.byte(j));
  }
}

// Decodes two-byte values.
template <u32 N, class Decode> KV_DEV void kv_run_pairs(const u8* at, float (&out)[N], Decode decode) {
#pragma unroll
  for (u32 i = 0; i < N; i += 4) {
    const KvBytes8 four = kv_bytes8(at + 2 * i);
#pragma unroll
    for (u32 j = 0; j < 4; j++) out[i + j] = decode((u16)(four.word[j / 2] >> (j % 2 * 16)));
  }
}

template <u32 N> KV_DEV void kv_run_q4_0(const u8* block, u32 at, float (&out)[N]) {
  const float factor = kv_half_at(block);
#pragma unroll
  for (u32 i = 0; i < N; i += 8) {
    const KvBytes8 codes = kv_bytes8(block + 2 + (at + i) % 16);
#pragma unroll
    for (u32 j = 0; j < 8; j++)
      out[i + j] = ((float)(codes.byte(j) >> ((at + i) / 16 * 4) & 15) - 8.f) * factor;
  }
}

template <u32 N> KV_DEV void kv_run_nvfp4(const u8* codes, const u8* scales, float scale, float (&out)[N]) {
#pragma unroll
  for (u32 i = 0; i < N; i += 8) {
    const u32 eight = kv_pair(codes + i / 2) | kv_pair(codes + i / 2 + 2) << 16;
    const float factor = kv_e4m3_decode(scales[i / 16]) * scale;
#pragma unroll
    for (u32 j = 0; j < 8; j++) out[i + j] = kv_e2m1_decode(eight >> (j * 4)) * factor;
  }
}

// Decodes levels `begin..begin + N`, all before `dim` and, in formats with groups, in a whole
// group.
template <u32 N>
KV_DEV void kv_run(u32 format, const u8* row, u32 scales_begin, float scale, u32 begin, float (&out)[N]) {
  const u8* scales = row + scales_begin;
  const u32 group = begin / KV_GROUP, at = begin % KV_GROUP;
  switch (format) {
    case KV_FMT_F32:
#pragma unroll
      for (u32 i = 0; i < N; i++) out[i] = ((const float*)row)[begin + i];
      return;
    case KV_FMT_F16: return kv_run_pairs(row + 2 * begin, out, [](u16 x) { return kv_f16_f(x); });
    case KV_FMT_BF16: return kv_run_pairs(row + 2 * begin, out, [](u16 x) { return kv_bf16_f(x); });
    case KV_FMT_E4M3: case KV_FMT_E4M3_HEAD: case KV_FMT_E4M3_ROW:
      return kv_run_bytes(row + begin, out, [](u32 code) { return kv_e4m3_decode(code); });
    case KV_FMT_E5M2: case KV_FMT_E5M2_HEAD: case KV_FMT_E5M2_ROW:
      return kv_run_bytes(row + begin, out, [](u32 code) { return kv_e5m2_decode(code); });
    case KV_FMT_INT8: case KV_FMT_INT8_HEAD: case KV_FMT_INT8_ROW:
      return kv_run_bytes(row + begin, out, [](u32 code) { return (float)(i8)code; });
    case KV_FMT_L6: return kv_run_lloyd<6>(row, begin, 1.f, out);
    case KV_FMT_L4: return kv_run_lloyd<4>(row, begin, 1.f, out);
    case KV_FMT_L3: return kv_run_lloyd<3>(row, begin, 1.f, out);
    case KV_FMT_L6_G32: return kv_run_lloyd<6>(row, begin, kv_e4m3_decode(scales[group]), out);
    case KV_FMT_L4_G32: return kv_run_lloyd<4>(row, begin, kv_e4m3_decode(scales[group]), out);
    case KV_FMT_L3_G32: return kv_run_lloyd<3>(row, begin, kv_e4m3_decode(scales[group]), out);
    case KV_FMT_Q8_0: {
      const u8* block = row + group * 34;
      const float factor = kv_half_at(block);
      return kv_run_bytes(block + 2 + at, out, [=](u32 code) { return (float)(i8)code * factor; });
    }
    case KV_FMT_Q4_0: return kv_run_q4_0(row + group * 18, at, out);
    case KV_FMT_NVFP4: return kv_run_nvfp4(row + begin / 2, scales + begin / 16, scale, out);
    default: kv_unknown_format(format);
  }
}

template <u32 N>
KV_DEV void kv_levels(u32 format, const u8* row, u32 scales_begin, u32 dim, float scale, u32 begin, float (&out)[N]) {
  static_assert(N % 8 == 0 && 32 % N == 0, "runs that no group is cut by");
  // The last group of a row may be shorter and is then packed by its own length.
  const bool grouped = format >= KV_FMT_L6 && format <= KV_FMT_L3_G32;
  const u32 end = grouped ? begin / KV_GROUP * KV_GROUP + KV_GROUP : begin + N;
  if (end <= dim) return kv_run<N>(format, row, scales_begin, scale, begin, out);
  // One by one, in a loop that is not unrolled: it runs at most once per row.
#pragma unroll
  for (u32 i = 0; i < N; i++) out[i] = 0.f;
#pragma unroll 1
  for (u32 i = 0; i < N && begin + i < dim; i++) {
    const float level = kv_level_at(format, row, scales_begin, dim, scale, begin + i);
#pragma unroll
    for (u32 j = 0; j < N; j++) out[j] = j == i ? level : out[j];
  }
}

template <u32 N>
KV_DEV void kv_values(u32 format, const u8* row, u32 scales_begin, u32 dim, float scale, u32 begin, float (&out)[N]) {
  kv_levels<N>(format, row, scales_begin, dim, scale, begin, out);
  const float factor = kv_factor(format, row, scales_begin, scale);
  const u32 here = begin < dim ? dim - begin : 0;
#pragma unroll
  for (u32 i = 0; i < N; i++) out[i] = N <= here || i < here ? out[i] * factor : 0.f;  // the factor may be NaN
}
