// Decoding of eight consecutive values to f16 levels, in two steps: load the bytes, so that many
// loads are in flight, then convert. Part of prefill.h. Levels and factors are those of format.h,
// except:
//
//   - nvfp4: the calibrated scale is the factor, so that levels are exact;
//   - q8_0 and q4_0: levels are relative to a power of two, the factor, chosen from the largest
//     scale of the row. They neither overflow f16 nor, if they matter, underflow.
//
// Levels of the Lloyd-Max formats, q8_0 and q4_0 are rounded to f16; the others are exact.
#pragma once
#include "format.h"
#include "prefill_item.h"

// Bytes of eight values, and the scale that they share with their neighbours.
struct KvRaw8 { u32 word[4]; float scale; };

KV_DEV u32 kv_raw_byte(const u32 (&word)[4], u32 from, u32 i) { return word[from + i / 4] >> (i % 4 * 8) & 0xff; }

// Returns the first of the formats that differ only in scaling.
KV_DEV constexpr u32 kv_family(u32 format) {
  return format >= KV_FMT_E4M3 && format <= KV_FMT_E4M3_ROW   ? (u32)KV_FMT_E4M3
         : format >= KV_FMT_E5M2 && format <= KV_FMT_E5M2_ROW ? (u32)KV_FMT_E5M2
         : format >= KV_FMT_INT8_ROW && format <= KV_FMT_INT8_HEAD ? (u32)KV_FMT_INT8
                                                                   : format;
}

KV_DEV constexpr u32 kv_lloyd_bits(u32 family) {
  return family == KV_FMT_L6 || family == KV_FMT_L6_G32   ? 6
         : family == KV_FMT_L4 || family == KV_FMT_L4_G32 ? 4
         : family == KV_FMT_L3 || family == KV_FMT_L3_G32 ? 3
                                                          : 0;
}

// Returns entry `i` of a format's codebook. A copy in shared memory has one entry per bank.
KV_DEV float kv_book_entry(u32 format, u32 i) {
  const u32 bits = kv_lloyd_bits(kv_family(format));
  return bits == 6 ? kv_magnitude<6>(i) : bits == 4 ? kv_magnitude<4>(i) : bits == 3 ? kv_magnitude<3>(i) : 0.f;
}

// Returns the factor of a row.
KV_DEV float kv_row_factor(u32 format, const u8* row, u32 scales_begin, float scale, u32 dim) {
  if (format == KV_FMT_NVFP4) return scale;
  if (format != KV_FMT_Q8_0 && format != KV_FMT_Q4_0) return kv_factor(format, row, scales_begin, scale);
  const u32 step = format == KV_FMT_Q8_0 ? 34 : 18;
  float most = 0.f;
  for (u32 i = 0; i * 32 < dim; i++) most = kv_max(most, kv_abs(kv_half_at(row + i * step)));
  // Scales the largest scale to between 64 and 128: less than 2^14 after multiplication by a code.
  const u32 exponent = kv_as_u(most) >> 23;
  return exponent == 0 || exponent == 255 ? 1.f : kv_as_f((exponent - 6) << 23);
}
// Returns log2, rounded down, of the largest level of a format that has a factor; 0 for others.
KV_DEV u32 kv_level_exponent(u32 format) {
  switch (kv_family(format)) {
    case KV_FMT_INT8: return 6;
    case KV_FMT_E4M3: return 8;
    case KV_FMT_E5M2: return 14;
    case KV_FMT_L6: case KV_FMT_L4: case KV_FMT_L3: return 1;
    case KV_FMT_Q8_0: return 13;
    case KV_FMT_Q4_0: return 9;
    case KV_FMT_NVFP4: return 11;
    default: return 0;
  }
}

// Returns the factor of a row in 16 bits among codes of `format`: a power of two that makes its
// levels as large as those of codes, so that weights times factors measure the influence of tokens.
KV_DEV float kv_wide_factor(u32 format, const u8* row, u32 dim) {
  const u32 wanted = kv_level_exponent(format);
  if (wanted == 0) return 1.f;
  u32 most = 0;
  for (u32 i = 0; i < dim; i += 4) {
    const KvBytes8 four = kv_bytes8(row + 2 * i);
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      const u32 bits = four.word[j / 2] >> (j % 2 * 16) & 0x7fff;
      most = bits > most ? bits : most;
    }
  }
  const u32 exponent = kv_as_u(kv_f16_f((u16)most)) >> 23;
  return exponent == 0 || exponent == 255 ? 1.f : kv_as_f((exponent - wanted) << 23);
}
// Returns the reciprocal of a power of two.
KV_DEV float kv_power_inverse(float power) { return kv_as_f((254u << 23) - kv_as_u(power)); }

// Loads the bytes of eight values. `whole` is the end of the row's whole groups; 16 values after it
// are a group of their own.
template <u32 FAMILY> KV_DEV KvRaw8 kv_raw8(const u8* row, u32 scales_begin, u32 whole, u32 begin) {
  constexpr u32 bits = kv_lloyd_bits(FAMILY);
  const u8* scales = row + scales_begin;
  const u32 group = begin / KV_GROUP, at = begin % KV_GROUP;
  KvRaw8 raw = {{0, 0, 0, 0}, 1.f};
  auto eight = [&](u32 to, const u8* from) {
    const KvBytes8 bytes = kv_bytes8(from);
    raw.word[to] = bytes.word[0], raw.word[to + 1] = bytes.word[1];
  };
  if constexpr (bits != 0) {
    const u8* from = row + group * kv_group_bytes(bits);
    const bool half = begin >= whole;
    if (bits == 3 && half) raw.word[0] = kv_pair(from) | kv_pair(from + 2) << 16;
    else eight(0, bits == 3 || half ? from : from + at % 16);
    if (bits == 6 && half) raw.word[2] = kv_pair(from + 8) | kv_pair(from + 10) << 16;
    else if (bits == 6) eight(2, from + 16);
    if (bits == 3 && half) raw.word[2] = kv_pair(from + 4);
    else if (bits == 3) raw.word[2] = kv_pair(from + 8) | kv_pair(from + 10) << 16;
    if (FAMILY == KV_FMT_L6_G32 || FAMILY == KV_FMT_L4_G32 || FAMILY == KV_FMT_L3_G32)
      raw.scale = kv_e4m3_decode(scales[group]);
  } else if constexpr (FAMILY == KV_FMT_F16) {
    eight(0, row + 2 * begin);
    eight(2, row + 2 * begin + 8);
  } else if constexpr (FAMILY == KV_FMT_Q8_0) {
    raw.scale = kv_half_at(row + group * 34);
    eight(0, row + group * 34 + 2 + at);
  } else if constexpr (FAMILY == KV_FMT_Q4_0) {
    raw.scale = kv_half_at(row + group * 18);
    eight(0, row + group * 18 + 2 + at % 16);
  } else if constexpr (FAMILY == KV_FMT_NVFP4) {
    raw.scale = kv_e4m3_decode(scales[begin / 16]);
    raw.word[0] = kv_pair(row + begin / 2) | kv_pair(row + begin / 2 + 2) << 16;
  } else {
    eight(0, row + begin);
  }
  return raw;
}

// Extracts code `i` of eight of a Lloyd-Max format.
template <u32 BITS> KV_DEV u32 kv_raw_code(const KvRaw8& raw, u32 at, bool half, u32 i) {
  // The first half of a whole group corresponds to the first quarter of half a group.
  const u32 nibble = kv_raw_byte(raw.word, 0, i) >> (half ? at / 8 * 4 : at / 16 * 4) & 15;
  // In half a group, values four apart share a byte.
  const u32 place = half ? i % 4 : i, shift = half ? (at + i) / 4 * 2 : at / 8 * 2;
  if (BITS == 4) return nibble;
  if (BITS == 6) return nibble | (raw.word[2 + place / 4] >> (place % 4 * 8 + shift) & 3) << 4;
  const u32 sign = raw.word[2] >> (half ? i % 2 * 8 + (at + i) / 2 : i % 4 * 8 + (at + i) / 4) & 1;
  return (raw.word[place / 4] >> (place % 4 * 8 + shift) & 3) | sign << 2;
}

// Converts eight values to levels.
template <u32 FAMILY>
KV_DEV KvWord4 kv_levels8(const KvRaw8& raw, u32 whole, u32 begin, const float* book, float factor) {
  constexpr u32 bits = kv_lloyd_bits(FAMILY);
  const u32 at = begin % KV_GROUP;
  u32 out[4];
  if constexpr (FAMILY == KV_FMT_F16) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      out[i] = raw.word[i];
      if (factor == 1.f) continue;
      const float by = kv_power_inverse(factor);
      out[i] = kv_pack(KvF16(), kv_f16_f((u16)out[i]) * by, kv_f16_f((u16)(out[i] >> 16)) * by);
    }
  } else if constexpr (FAMILY == KV_FMT_E4M3 || FAMILY == KV_FMT_E5M2 || FAMILY == KV_FMT_INT8) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const u32 two = raw.word[i / 2] >> (i % 2 * 16);
      out[i] = FAMILY == KV_FMT_E4M3   ? kv_e4m3x2_f16x2(two)
               : FAMILY == KV_FMT_E5M2 ? kv_prmt(two, 0, 0x1404)  // the upper bytes of f16
                                       : kv_int8x2_f16x2(two);
    }
  } else {
    constexpr bool blocks = FAMILY == KV_FMT_Q8_0 || FAMILY == KV_FMT_Q4_0;
    const float scale = blocks ? raw.scale * kv_power_inverse(factor) : raw.scale;
    [[maybe_unused]] const bool half = begin >= whole;
    float level[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
      if constexpr (bits != 0) {
        const u32 code = kv_raw_code<bits>(raw, at, half, i);
        level[i] = kv_as_f(kv_as_u(book[code & ((1u << (bits - 1)) - 1)]) | (code >> (bits - 1)) << 31);
      } else if constexpr (FAMILY == KV_FMT_Q8_0) {
        level[i] = (float)(i8)kv_raw_byte(raw.word, 0, i);
      } else if constexpr (FAMILY == KV_FMT_Q4_0) {
        level[i] = (float)(kv_raw_byte(raw.word, 0, i) >> (at / 16 * 4) & 15) - 8.f;
      } else {
        level[i] = kv_e2m1_decode(raw.word[0] >> (i * 4));
      }
      if (FAMILY != KV_FMT_L6 && FAMILY != KV_FMT_L4 && FAMILY != KV_FMT_L3) level[i] *= scale;
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) out[i] = kv_pack(KvF16(), level[2 * i], level[2 * i + 1]);
  }
  return {out[0], out[1], out[2], out[3]};
}

// Addresses of a token's rows of K and V; 0 for a token that is not needed.
struct KvCodedRows { u64 row[2]; u32 wide, pad; };

// A tile of K and V to decode.
struct KvCodedTile {
  const KvCodedRows* tokens;
  const float* factors;        // [K, V][tokens]
  const float* books;          // [K, V][32]
  u8* to[2];                   // [tokens] rows, swizzled as in prefill_item.h
  u32 formats[2], scales_begin[2];
  u32 num_tokens, chunks;      // chunks of eight values per row
  bool has_wide;               // may contain rows in 16 bits among codes
};

// Decodes the rows of a plane whose `wide` flag is this one.
template <u32 FAMILY> KV_DEV void kv_decode_rows(const KvCodedTile& tile, u32 plane, u32 wide) {
  constexpr u32 AT_ONCE = 4, THREADS = 128;
  const float *factors = tile.factors + plane * tile.num_tokens, *book = tile.books + plane * 32;
  const u32 scales_begin = tile.scales_begin[plane], whole = tile.chunks / 4 * KV_GROUP;
  const u32 runs = tile.num_tokens * tile.chunks, inverse = 65536 / tile.chunks + 1;  // exact up to 4096 runs
  u8* to = tile.to[plane];
#pragma unroll 1
  for (u32 first = threadIdx.x; first < runs; first += AT_ONCE * THREADS) {
    KvRaw8 raw[AT_ONCE];
    u32 place[AT_ONCE];  // token and chunk, or KV_NONE
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; j++) {
      const u32 i = first + j * THREADS, token = i * inverse >> 16, chunk = i - token * tile.chunks;
      raw[j] = {{0, 0, 0, 0}, 0.f};
      place[j] = KV_NONE;
      if (i >= runs) continue;
      const KvCodedRows& at = tile.tokens[token];
      const u64 row = plane == 0 ? at.row[0] : at.row[1];
      if (at.wide != wide) continue;
      place[j] = token << 16 | chunk;
      if (row != 0) raw[j] = kv_raw8<FAMILY>((const u8*)row, scales_begin, whole, chunk * 8);
      else place[j] |= 0x8000u;
    }
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; j++) {
      if (place[j] == KV_NONE) continue;
      const u32 token = place[j] >> 16, chunk = place[j] & 0x7fffu;
      KvWord4 out = {0, 0, 0, 0};
      if ((place[j] & 0x8000u) == 0) out = kv_levels8<FAMILY>(raw[j], whole, chunk * 8, book, factors[token]);
      *(KvWord4*)(to + kv_swizzled(token, chunk, tile.chunks)) = out;
    }
  }
}

// Decodes a tile with 128 threads. Not inlined, since it contains every stored format.
KV_DEV_CALL void kv_decode_tile(const KvCodedTile& tile) {
#pragma unroll 1
  for (u32 pass = 0; pass < (tile.has_wide ? 4u : 2u); pass++) {
    const u32 plane = pass % 2, wide = pass / 2, own = plane == 0 ? tile.formats[0] : tile.formats[1];
    switch (kv_family(wide != 0 ? (u32)KV_FMT_F16 : own)) {
      case KV_FMT_F16: kv_decode_rows<KV_FMT_F16>(tile, plane, wide); break;
      case KV_FMT_E4M3: kv_decode_rows<KV_FMT_E4M3>(tile, plane, wide); break;
      case KV_FMT_E5M2: kv_decode_rows<KV_FMT_E5M2>(tile, plane, wide); break;
      case KV_FMT_INT8: kv_decode_rows<KV_FMT_INT8>(tile, plane, wide); break;
      case KV_FMT_L6: kv_decode_rows<KV_FMT_L6>(tile, plane, wide); break;
      case KV_FMT_L6_G32: kv_decode_rows<KV_FMT_L6_G32>(tile, plane, wide); break;
      case KV_FMT_L4: kv_decode_rows<KV_FMT_L4>(tile, plane, wide); break;
      case KV_FMT_L4_G32: kv_decode_rows<KV_FMT_L4_G32>(tile, plane, wide); break;
      case KV_FMT_L3: kv_decode_rows<KV_FMT_L3>(tile, plane, wide); break;
      case KV_FMT_L3_G32: kv_decode_rows<KV_FMT_L3_G32>(tile, plane, wide); break;
      case KV_FMT_Q8_0: kv_decode_rows<KV_FMT_Q8_0>(tile, plane, wide); break;
      case KV_FMT_Q4_0: kv_decode_rows<KV_FMT_Q4_0>(tile, plane, wide); break;
      case KV_FMT_NVFP4: kv_decode_rows<KV_FMT_NVFP4>(tile, plane, wide); break;
      default: kv_unknown_format(own);
    }
  }
}
