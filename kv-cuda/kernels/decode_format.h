// Stored formats as mma operands: fragments of 16 tokens of K and V from rows in shared memory.
//
// A B fragment of the mma has 16 values of 8 tokens; lane (g, t) = (lane / 4, lane % 4) holds
// values of token g, or of channel g for V. 16-bit values are loaded by ldmatrix. One-byte codes
// are read in the order of memory, up to 16 of a row at a time, and converted to f16 in registers:
// the assignment of columns to fragment positions is free, as long as queries (for K) or the output
// (for V) use the same one.
#pragma once
#include "params.h"

// The swizzle of 16-byte chunks: chunk `i` of a row is stored in place `i ^ swizzle(row)`, so that
// the same chunk of 8 rows is in different banks. It permutes chunks within the period of a row
// length.
constexpr u32 kv_decode_period(u32 chunks) {
  return chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : chunks % 2 == 0 ? 2 : 1;
}
template <int CHUNKS> KV_DEV u32 kv_decode_swizzle(u32 row) {
  constexpr u32 period = kv_decode_period(CHUNKS);
  return row / (8 / period) % period;
}

// Returns the token of score `j` of tile `n`, except for 2 * (lane & 3).
KV_DEV u32 kv_decode_token(u32 n, u32 j) { return n * 8 + (j & 1); }

template <class T> struct KvDecodePlain {
  typedef T Math;
  typedef u32 Weights[2][4];
  static constexpr bool CODES = false, SCALED = false;
  static KV_DEV u32 token(u32 n, u32 j) { return kv_decode_token(n, j); }

  template <int DIM> static constexpr u32 row_stride() { return DIM * 2; }  // in shared memory

  template <int DIM> static KV_DEV u32 swizzle(bool, u32 row) { return kv_decode_swizzle<DIM / 8>(row); }
  // Returns the place of a chunk in its row.
  template <int DIM> static KV_DEV u32 place(bool is_v, u32 row, u32 chunk) { return chunk ^ swizzle<DIM>(is_v, row); }
  // Given the address of chunk 0 or 1 of a row, returns that of the chunk `even` further on.
  template <int DIM> static KV_DEV u32 chunk_address(u32 at, u32 even) {
    constexpr u32 period = kv_decode_period(DIM / 8);
    return (at ^ even % period * 16) + even / period * period * 16;
  }
  // Returns the first of the two columns in register `r` of k-step `k`.
  static KV_DEV u32 query_column(u32 k, u32 r, u32 t) { return k * 16 + t * 2 + (r >> 1) * 8; }
  // Returns the column of value `j` of accumulator `d`.
  template <int DIM> static KV_DEV u32 column(u32 d, u32 j, u32 t) { return d * 8 + t * 2 + (j & 1); }

  static KV_DEV float weight(u32 bits) { return number(T(), (u16)bits); }
  // Decodes one value of a row of V.
  template <int DIM> static KV_DEV float value(const u8* v_rows, u32 row, u32 column) {
    return number(T(), *(const u16*)(v_rows + row * DIM * 2 + place<DIM>(true, row, column / 8) * 16 + column % 8 * 2));
  }
  static KV_DEV float number(KvF16, u16 x) { return kv_f16_f(x); }
  static KV_DEV float number(KvBf16, u16 x) { return kv_bf16_f(x); }

  template <int DIM, class Query>
  static KV_DEV void scores(const Query& query, u32 k_rows, u32 lane, float (&s)[4][4]) {
#pragma unroll
    for (u32 n = 0; n < 4; n++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) s[n][j] = 0.f;
    const u32 row = (lane >> 4) * 8 + (lane & 7);
    const u32 at = k_rows + row * DIM * 2 + place<DIM>(false, row, lane >> 3 & 1) * 16;
    // Further unrolling would preload queries from shared memory into registers.
    [[maybe_unused]] constexpr int steps = Query::IS_SHARED ? 4 : DIM / 16;
#pragma unroll steps
    for (u32 k = 0; k < DIM / 16; k++) {
      u32 a[4];
      query.get(k, lane, a);
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        u32 b[4];
        kv_ldsm4_at(b, chunk_address<DIM>(at, k * 2) + half * 16 * DIM * 2);
        kv_mma(T(), s[half * 2], a, b[0], b[1]);
        kv_mma(T(), s[half * 2 + 1], a, b[2], b[3]);
      }
    }
  }

  template <int DIM>
  static KV_DEV void sum(const u32 (&weights)[2][4], u32 v_rows, u32 lane, float (&o)[DIM / 8][4]) {
    const u32 row = (lane >> 3 & 1) * 8 + (lane & 7);
    const u32 at = v_rows + row * DIM * 2 + place<DIM>(true, row, lane >> 4) * 16;
#pragma unroll
    for (u32 half = 0; half < 2; half++)
#pragma unroll
      for (u32 d = 0; d < DIM / 8; d += 2) {
        u32 b[4];
        kv_ldsm4t_at(b, chunk_address<DIM>(at, d) + half * 16 * DIM * 2);
        kv_mma(T(), o[d], weights[half], b[0], b[1]);
        kv_mma(T(), o[d + 1], weights[half], b[2], b[3]);
      }
  }
};

// One-byte codes. `C::pair` converts the lower two to f16x2, `C::pairs` also the upper two.
template <class C> struct KvDecodeCodes {
  typedef KvF16 Math;
  typedef u32 Weights[2][4];
  static constexpr bool CODES = true, SCALED = false;
  static KV_DEV u32 token(u32 n, u32 j) { return kv_decode_token(n, j); }

  template <int DIM> static constexpr u32 row_stride() { return DIM; }

  // Lanes that read together use different banks: they read two whole rows of K, or every other row
  // of V.
  template <int DIM> static KV_DEV u32 place(bool is_v, u32 row, u32 chunk) {
    constexpr int chunks = DIM / 16, whole = chunks / 8 * 8;
    if (is_v) return (int)chunk < whole ? chunk ^ (row & 6) : chunks == 4 ? chunk ^ (row & 2) : chunk;
    return chunks % 8 == 0 ? chunk ^ (row & 1) * 4 : chunk;
  }
  // For rows of 4, 8 or 16 chunks: the XOR that `place` applies.
  template <int DIM> static KV_DEV u32 swizzle(bool is_v, u32 row) { return place<DIM>(is_v, row, 0); }
  // Returns where a query's columns `column` and the next one are in fragments, in words, except for
  // the row. Four lanes share 64 values of K, 16 each, and divide the remainder evenly; a k-step takes
  // 4 values of each.
  template <int DIM> static KV_DEV u32 query_place(u32 column) {
    const u32 base = column / 64 * 64, width = DIM % 64 == 0 || base + 64 <= DIM ? 16 : DIM % 64 / 4;
    const u32 nth = column - base, inside = nth % width;
    return (base / 16 + inside / 4) * 128 + nth / width * 4 + inside / 2 % 2 * 2;
  }
  // Eight lanes share 128 values of V, 16 each; then 64, 32 and 16.
  struct Run { u32 base, width; };
  template <int DIM> static KV_DEV constexpr Run run_at(u32 column) {
    constexpr int whole = DIM / 128 * 128, half = DIM / 64 * 64, quarter = DIM / 32 * 32;
    const int at = (int)column;
    return at < whole     ? Run{column / 128 * 128, 16}
           : at < half    ? Run{whole, 8}
           : at < quarter ? Run{half, 4}
                          : Run{quarter, 2};
  }
  template <int DIM> static KV_DEV u32 column(u32 d, u32 j, u32 t) {
    const Run run = run_at<DIM>(d * 8);
    return run.base + (t * 2 + (j & 1)) * run.width + (d * 8 - run.base) / 8;
  }

  static KV_DEV float weight(u32 bits) { return kv_f16_f((u16)bits); }
  // Decodes one value of a row of V.
  template <int DIM> static KV_DEV float value(const u8* v_rows, u32 row, u32 column) {
    return weight(C::pair(v_rows[row * DIM + place<DIM>(true, row, column / 16) * 16 + column % 16]));
  }

  // Reads `WIDTH` bytes of a row, as words.
  template <int WIDTH> static KV_DEV void read(u32 (&words)[4], u32 at) {
    if constexpr (WIDTH == 16) {
      uint4 x;
      kv_lds_at(at, x);
      words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    } else if constexpr (WIDTH == 8) {
      uint2 x;
      kv_lds_at(at, x);
      words[0] = x.x, words[1] = x.y;
    } else if constexpr (WIDTH == 4) {
      kv_lds_at(at, words[0]);
    } else {
      u16 x;
      kv_lds_at(at, x);
      words[0] = x;
    }
  }

  template <int DIM, int BASE, int WIDTH, class Query>
  static KV_DEV void score_run(const Query& query, u32 k_rows, u32 lane, float (&s)[4][4]) {
    const u32 g = lane >> 2, t = lane & 3, byte = BASE + t * WIDTH;
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
      const u32 row = n * 8 + g;
      u32 x[4];
      read<WIDTH>(x, k_rows + row * DIM + place<DIM>(false, row, byte / 16) * 16 + byte % 16);
#pragma unroll
      for (u32 i = 0; i < WIDTH / 4; i++) {
        u32 a[4], low, high;
        query.get(BASE / 16 + i, lane, a);
        C::pairs(x[i], low, high);
        kv_mma(KvF16(), s[n], a, low, high);
      }
    }
  }
  template <int DIM, class Query>
  static KV_DEV void scores(const Query& query, u32 k_rows, u32 lane, float (&s)[4][4]) {
#pragma unroll
    for (u32 n = 0; n < 4; n++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) s[n][j] = 0.f;
    score_run<DIM, 0, 16>(query, k_rows, lane, s);
    if constexpr (DIM >= 128) score_run<DIM, 64, 16>(query, k_rows, lane, s);
    if constexpr (DIM >= 192) score_run<DIM, 128, 16>(query, k_rows, lane, s);
    if constexpr (DIM >= 256) score_run<DIM, 192, 16>(query, k_rows, lane, s);
    if constexpr (DIM % 64 == 32) score_run<DIM, DIM / 64 * 64, 8>(query, k_rows, lane, s);
    if constexpr (DIM % 64 == 16) score_run<DIM, DIM / 64 * 64, 4>(query, k_rows, lane, s);
  }

  template <int DIM, int BASE, int WIDTH>
  static KV_DEV void sum_run(const u32 (&weights)[2][4], u32 v_rows, u32 lane, float (&o)[DIM / 8][4]) {
    const u32 g = lane >> 2, t = lane & 3, byte = BASE + g * WIDTH;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      u32 x[4][4];  // tokens 2t, 2t + 1, 2t + 8, 2t + 9: those of this lane's weights
#pragma unroll
      for (u32 r = 0; r < 4; r++) {
        const u32 row = half * 16 + t * 2 + (r & 1) + (r >> 1) * 8;
        read<WIDTH>(x[r], v_rows + row * DIM + place<DIM>(true, row, byte / 16) * 16 + byte % 16);
      }
#pragma unroll
      for (u32 i = 0; i < (WIDTH + 3) / 4; i++) {
        constexpr u32 first = BASE / 8;
        u32 a[2], b[2];
        C::pairs(kv_prmt(x[0][i], x[1][i], 0x5140), a[0], a[1]);
        C::pairs(kv_prmt(x[2][i], x[3][i], 0x5140), b[0], b[1]);
#pragma unroll
        for (u32 j = 0; j < 2; j++) kv_mma(KvF16(), o[first + i * 4 + j], weights[half], a[j], b[j]);
        if constexpr (WIDTH > 2) {
          C::pairs(kv_prmt(x[0][i], x[1][i], 0x7362), a[0], a[1]);
          C::pairs(kv_prmt(x[2][i], x[3][i], 0x7362), b[0], b[1]);
#pragma unroll
          for (u32 j = 0; j < 2; j++) kv_mma(KvF16(), o[first + i * 4 + 2 + j], weights[half], a[j], b[j]);
        }
      }
    }
  }
  template <int DIM>
  static KV_DEV void sum(const u32 (&weights)[2][4], u32 v_rows, u32 lane, float (&o)[DIM / 8][4]) {
    if constexpr (DIM >= 128) sum_run<DIM, 0, 16>(weights, v_rows, lane, o);
    if constexpr (DIM >= 256) sum_run<DIM, 128, 16>(weights, v_rows, lane, o);
    if constexpr (DIM % 128 >= 64) sum_run<DIM, DIM / 128 * 128, 8>(weights, v_rows, lane, o);
    if constexpr (DIM % 64 >= 32) sum_run<DIM, DIM / 64 * 64, 4>(weights, v_rows, lane, o);
    if constexpr (DIM % 32 >= 16) sum_run<DIM, DIM / 32 * 32, 2>(weights, v_rows, lane, o);
  }
};

struct KvCodeE4m3 {
  static KV_DEV u32 pair(u32 x) { return kv_e4m3x2_f16x2(x); }
  static KV_DEV void pairs(u32 x, u32& low, u32& high) { kv_e4m3x4_f16x2(x, low, high); }
};
struct KvCodeE5m2 {  // the upper bytes of f16
  static KV_DEV u32 pair(u32 x) { return kv_prmt(x, 0, 0x1404); }
  static KV_DEV void pairs(u32 x, u32& low, u32& high) { low = kv_prmt(x, 0, 0x1404), high = kv_prmt(x, 0, 0x3424); }
};
struct KvCodeInt8 {
  static KV_DEV u32 pair(u32 x) { return kv_int8x2_f16x2(x); }
  static KV_DEV void pairs(u32 x, u32& low, u32& high) { kv_int8x4_f16x2(x, low, high); }
};
