// Codes with a scale per row as mma operands: the third kind of format besides those in
// decode_format.h.
//
// Such rows are 2-byte aligned. A warp copies every 16-byte chunk that contains a byte of a row:
// one more than the codes fill, wherever the row begins. The chunks are inside the row's block,
// which begins and ends at 16 bytes; bytes of neighbouring rows are copied but not used. Each lane
// remembers the offset of one row in its first chunk and passes it to the lanes that read the row.
// Codes are read as aligned words; for an unaligned row, prmt combines two consecutive words.
//
// Rows are packed in shared memory without a swizzle. With contiguous tokens and 128 bytes of
// codes, reads have no bank conflicts. Other lengths have two-way conflicts, and rows that all
// begin at the same offset of a chunk (because several heads of a token are between them) up to
// four-way ones.
//
// The scale of a K row multiplies scores. The scale of a V row multiplies weights before they are
// packed to f16, relative to a weight_scale per query row that follows the largest product so far,
// so that tiny scales lose no precision.
#pragma once
#include "decode_format.h"

// Returns the largest power of two up to `n`: the values that the Hadamard transform mixes.
constexpr int kv_decode_run(int n) {
  int run = 1;
  while (run * 2 <= n) run *= 2;
  return run;
}

template <class C> struct KvDecodeRowCodes {
  typedef KvF16 Math;
  typedef float Weights[4][4];
  static constexpr int VALUES = C::VALUES;  // per byte
  static constexpr bool CODES = true, SCALED = true;
  static constexpr float LEVEL_SCALE = C::LEVEL_SCALE;  // times a decoded code gives its level

  template <int DIM> static constexpr u32 codes() { return DIM / VALUES; }  // bytes
  template <int DIM> static constexpr u32 row_stride() { return DIM / VALUES + 16; }
  template <int DIM> static KV_DEV u32 place(bool, u32, u32 chunk) { return chunk; }

  // Returns the column of value `nth` of byte `byte` of a row's codes. Two codes per byte are
  // packed in groups of 32.
  static KV_DEV u32 column_of(u32 byte, u32 nth) { return VALUES == 1 ? byte : byte / 16 * 32 + byte % 16 + nth * 16; }
  // Returns the first of the two columns in register `r` of k-step `k`. Each run of codes is
  // divided evenly among four lanes.
  template <int DIM> static KV_DEV u32 query_column(u32 k, u32 r, u32 t) {
    constexpr u32 whole = kv_decode_run(DIM), rest = DIM - whole;
    const bool first = k * 16 < whole;
    const u32 base = first ? 0 : whole, width = (first ? whole : rest) / VALUES / 4, step = k - base / 16;
    const u32 byte = base / VALUES + t * width;
    return VALUES == 1 ? byte + step * 4 + (r >> 1) * 2 : column_of(byte + step * 2, r >> 1);
  }
  // Returns the column of value `j` of accumulator `d`. The codes of V are divided among eight
  // lanes.
  template <int DIM> static KV_DEV u32 column(u32 d, u32 j, u32 t) {
    return column_of((t * 2 + (j & 1)) * (codes<DIM>() / 8) + d / VALUES, d % VALUES);
  }

  // Decodes one value of a row of V that begins `row_offset` 2-byte units after `row`.
  template <int DIM> static KV_DEV float value(const u8* row, u32 row_offset, u32 d, u32 j, u32 t) {
    u32 x[VALUES];
    C::pairs(row[row_offset * 2 + (t * 2 + (j & 1)) * (codes<DIM>() / 8) + d / VALUES], x);
    return kv_f16_f((u16)x[d % VALUES]);
  }
  template <int DIM> static KV_DEV float scale(const u8* row, u32 row_offset) {
    return kv_f16_f(*(const u16*)(row + row_offset * 2 + codes<DIM>()));
  }

  static KV_DEV void multiply_all(const u32 (&a)[VALUES][4], const u32 (&b)[2][VALUES], float (&s)[4]) {
    if constexpr (VALUES == 1) {
      kv_mma(KvF16(), s, a[0], b[0][0], b[1][0]);
    } else {
      kv_mma(KvF16(), s, a[0], b[0][0], b[0][1]);
      kv_mma(KvF16(), s, a[1], b[1][0], b[1][1]);
    }
  }
  template <int DIM, int BASE, class Query>
  static KV_DEV void score_run(const Query& query, const u8* const (&rows)[4], const u32 (&selectors)[4], u32 lane,
                               float (&s)[4][4]) {
    constexpr int RUN = kv_decode_run(DIM - BASE);
    constexpr u32 WORDS = RUN / VALUES / 16;
    static_assert(WORDS > 0, "whole words of codes for each of four lanes");
    const u32* from[4];
    u32 word[4];
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
      from[n] = (const u32*)(rows[n] + BASE / VALUES) + (lane & 3) * WORDS;
      word[n] = from[n][0];
    }
    // Further unrolling would preload queries from shared memory into registers.
    [[maybe_unused]] constexpr int steps = Query::IS_SHARED && WORDS > 4 ? 4 : WORDS;
#pragma unroll steps
    for (u32 i = 0; i < WORDS; i++) {
      u32 a[VALUES][4], low[VALUES][4];
#pragma unroll
      for (u32 v = 0; v < VALUES; v++) {
        query.get(BASE / 16 + i * VALUES + v, lane, a[v]);
        if (query.has_low) query.get_low(BASE / 16 + i * VALUES + v, lane, low[v]);
      }
#pragma unroll
      for (u32 n = 0; n < 4; n++) {
        const u32 next = from[n][i + 1], x = kv_prmt(word[n], next, selectors[n]);
        word[n] = next;
        u32 b[2][VALUES];
        C::pairs(x, b[0]);
        C::pairs(x >> 16, b[1]);
        multiply_all(a, b, s[n]);
        if (query.has_low) multiply_all(low, b, s[n]);
      }
    }
    if constexpr (BASE + RUN < DIM) score_run<DIM, BASE + RUN>(query, rows, selectors, lane, s);
  }
  // Computes Q K^T of a subtile. `row_offset` belongs to row `lane`.
  template <int DIM, class Query>
  static KV_DEV void scores(const Query& query, const u8* k_rows, u32 row_offset, u32 lane, float (&s)[4][4]) {
    const u8* rows[4];
    u32 selectors[4];
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
#pragma unroll
      for (u32 j = 0; j < 4; j++) s[n][j] = 0.f;
      const u32 row = n * 8 + (lane >> 2), begin = kv_shfl(row_offset, row);
      rows[n] = k_rows + row * row_stride<DIM>() + (begin >> 1) * 4;
      selectors[n] = (begin & 1) != 0 ? 0x5432 : 0x3210;
    }
    score_run<DIM, 0>(query, rows, selectors, lane, s);
    multiply(scale<DIM>(k_rows + lane * row_stride<DIM>(), row_offset), lane, s);
  }
  // Multiplies the column of each token by its factor, which lane `token` holds.
  static KV_DEV void multiply(float own, u32 lane, float (&s)[4][4]) {
#pragma unroll
    for (u32 n = 0; n < 4; n++)
#pragma unroll
      for (u32 j = 0; j < 2; j++) {
        const float factor = kv_shflf(own, n * 8 + (lane & 3) * 2 + j);
        s[n][j] *= factor;
        s[n][j + 2] *= factor;
      }
  }

  // Accumulates two bytes of a row for four tokens: `a` and `b` each have byte 0 of two tokens in
  // the low half, byte 1 in the high half.
  template <int FIRST, int N>
  static KV_DEV void sum_two(const u32 (&weights)[4], u32 a, u32 b, float (&o)[N][4]) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      u32 x[VALUES], y[VALUES];
      C::pairs(a >> 16 * i, x);
      C::pairs(b >> 16 * i, y);
#pragma unroll
      for (u32 v = 0; v < VALUES; v++) kv_mma(KvF16(), o[FIRST + i * VALUES + v], weights, x[v], y[v]);
    }
  }
  template <int DIM, int AT>
  static KV_DEV void sum_word(const u32 (&weights)[4], const u32* const (&from)[4], const u32 (&selectors)[4],
                              u32 (&word)[4], float (&o)[DIM / 8][4]) {
    constexpr int BYTES = codes<DIM>() / 8;
    u32 x[4];
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
      const u32 next = AT + 2 < BYTES ? from[r][AT / 4 + 1] : 0;
      x[r] = kv_prmt(word[r], next, selectors[r]);
      word[r] = next;
    }
    sum_two<AT * VALUES>(weights, kv_prmt(x[0], x[1], 0x5140), kv_prmt(x[2], x[3], 0x5140), o);
    if constexpr (AT + 2 < BYTES) {
      sum_two<(AT + 2) * VALUES>(weights, kv_prmt(x[0], x[1], 0x7362), kv_prmt(x[2], x[3], 0x7362), o);
    }
    if constexpr (AT + 4 < BYTES) sum_word<DIM, AT + 4>(weights, from, selectors, word, o);
  }
  template <int DIM>
  static KV_DEV void sum(const u32 (&weights)[2][4], const u8* v_rows, u32 row_offset, u32 lane,
                         float (&o)[DIM / 8][4]) {
    const u32 g = lane >> 2, t = lane & 3;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      const u32* from[4];  // tokens 2t, 2t + 1, 2t + 8, 2t + 9: those of this lane's weights
      u32 selectors[4], word[4];
#pragma unroll
      for (u32 r = 0; r < 4; r++) {
        const u32 row = half * 16 + t * 2 + (r & 1) + (r >> 1) * 8;
        const u32 byte = kv_shfl(row_offset, row) * 2 + g * (codes<DIM>() / 8);
        from[r] = (const u32*)(v_rows + row * row_stride<DIM>()) + (byte >> 2);
        selectors[r] = (byte & 2) != 0 ? 0x5432 : 0x3210;
        word[r] = from[r][0];
      }
      sum_word<DIM, 0>(weights[half], from, selectors, word, o);
    }
  }
};

// One-byte codes, decoded by `C` as in KvDecodeCodes.
template <class C> struct KvRowOf {
  static constexpr int VALUES = 1;
  static constexpr float LEVEL_SCALE = 1.f;
  static KV_DEV void pairs(u32 x, u32 (&out)[1]) { out[0] = C::pair(x); }
};

// l4: decodes the lower two bytes to the f16 of their low nibbles and of their high nibbles. Levels
// are those of KV_BOOK4 divided by LEVEL_SCALE, which was chosen so that rounding them to f16 costs
// little: 1 / 10,800 of a level.
struct KvRowL4 {
  static constexpr int VALUES = 2;
  static constexpr float LEVEL_SCALE = 0.74970859f;
  static KV_DEV void pairs(u32 x, u32 (&out)[2]) {
    // The lower and upper bytes of the f16 levels are two tables of 8 bytes, which prmt indexes by
    // the codes.
    const u32 low = kv_prmt(0x0702247bu, 0x4a8551b4u, x & 0x7777u);
    const u32 high = kv_prmt(0x3d3b3831u, 0x4341403eu, x & 0x7777u) | (kv_prmt(x << 4, x, 0x5140) & 0x80808080u);
    out[0] = kv_prmt(low, high, 0x6240);
    out[1] = kv_prmt(low, high, 0x7351);
  }
};
