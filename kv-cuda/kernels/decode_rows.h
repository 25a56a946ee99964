// Codes with a scale per row as mma operands: the third kind of format besides those in
// decode_format.h.
//
// In shared memory the rows of a subtile lie one after another as in a block, without padding. All
// rows are a multiple of 16 bytes of codes and a scale of 2, so those of even tokens begin at a
// multiple of 4 bytes and those of odd tokens 2 bytes after one. An 8-token tile of scores has
// tokens of one parity, so that every lane knows at compile time which halves of a word are which
// codes: codes are read as aligned words, and no unaligned row is shifted.
//
// 16 tokens of a head are a multiple of 16 bytes. Where they are one run in a block
// (KvDecodeRing::is_dense), they are copied as they are. Otherwise a warp copies every 16-byte chunk
// that contains a byte of a row, one more than the codes fill, wherever the row begins: the chunks
// are inside the row's block, which begins and ends at 16 bytes. Bytes of neighbouring rows are
// copied but not used. Each lane remembers the offset of one row in its first chunk, and `close_up`
// moves rows to their places.
//
// With 128 bytes of codes, reads have no bank conflicts. Other lengths have two-way conflicts.
//
// The scale of a K row multiplies scores. The scale of a V row multiplies weights before they are
// packed to f16 (decode_scaled.h).
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

  template <int DIM> static constexpr u32 codes() { return DIM / VALUES; }             // bytes
  template <int DIM> static constexpr u32 row_bytes() { return DIM / VALUES + 2; }    // with the scale
  template <int DIM> static constexpr u32 row_stride() { return DIM / VALUES + 16; }  // of rows that are copied one by one
  template <int DIM> static KV_DEV u32 place(bool, u32, u32 chunk) { return chunk; }
  // Returns the token of score or weight `j` of tile `n`, except for 2 * (lane & 3). Tiles are the
  // even and the odd tokens of 16.
  static KV_DEV u32 token(u32 n, u32 j) { return n / 2 * 16 + (j & 1) * 8 + n % 2; }

  // Returns the column of value `nth` of byte `byte` of a row's codes. Two codes per byte are
  // packed in groups of 32.
  static KV_DEV u32 column_of(u32 byte, u32 nth) { return VALUES == 1 ? byte : byte / 16 * 32 + byte % 16 + nth * 16; }
  // Returns where a query's columns `column` and the next one are in fragments, in words, except for
  // the row. Each run of codes is divided evenly among four lanes; a k-step takes 4 values of each.
  template <int DIM> static KV_DEV u32 query_place(u32 column) {
    constexpr u32 whole = kv_decode_run(DIM), rest = DIM - whole;
    const bool first = rest == 0 || column < whole;
    const u32 base = first ? 0 : whole, width = (first ? whole : rest) / VALUES / 4, nth = column - base;
    const u32 byte = VALUES == 1 ? nth : nth / 32 * 16 + nth % 16, inside = byte % width;
    const u32 step = base / 16 + inside / (4 / VALUES), pair = VALUES == 1 ? inside / 2 % 2 : nth / 16 % 2;
    return step * 128 + byte / width * 4 + pair * 2;
  }
  // Returns the byte of a row that lane `g` of 8 reads for accumulator `d`. Each run of codes of V is
  // divided evenly among the lanes.
  template <int DIM> static KV_DEV u32 v_byte(u32 d, u32 g) {
    constexpr u32 whole = kv_decode_run(codes<DIM>()), rest = codes<DIM>() - whole;
    static_assert(rest == 0 || (int)rest == kv_decode_run(rest), "one run or two");
    const u32 nth = d / VALUES;
    return nth < whole / 8 ? g * (whole / 8) + nth : whole + g * (rest / 8) + nth - whole / 8;
  }
  // Returns the column of value `j` of accumulator `d`.
  template <int DIM> static KV_DEV u32 column(u32 d, u32 j, u32 t) {
    return column_of(v_byte<DIM>(d, t * 2 + (j & 1)), d % VALUES);
  }

  // Decodes one value of a row of V.
  template <int DIM> static KV_DEV float value(const u8* row, u32 d, u32 j, u32 t) {
    u32 x[VALUES];
    C().pairs(row[v_byte<DIM>(d, t * 2 + (j & 1))], x);
    return kv_f16_f((u16)x[d % VALUES]);
  }
  // Returns the scale of a row of the subtile at `rows`.
  template <int DIM> static KV_DEV float scale(u32 rows, u32 row) {
    u16 x;
    kv_lds_at(rows + row * row_bytes<DIM>() + codes<DIM>(), x);
    return kv_f16_f(x);
  }

  // Moves the rows of a subtile, which were copied one by one, to where they lie in a dense one.
  // `row_offset` belongs to row `lane`, in units of 2 bytes. Rows only move down: 8 rows are read
  // before they are written, and none overwrites a later one.
  template <int DIM> static KV_DEV void close_up(u8* rows, u32 row_offset, u32 lane) {
    constexpr u32 WORDS = codes<DIM>() / 16;
    const u32 g = lane >> 2, t = lane & 3, odd = g & 1;
#pragma unroll 1
    for (u32 first = 0; first < 32; first += 8) {
      const u32 row = first + g;
      const u16* const from = (const u16*)(rows + row * row_stride<DIM>()) + kv_shfl(row_offset, row);
      const u16* const own = from + odd + t * WORDS * 2;  // from here on words of the dense row are aligned
      const u32 edge = odd ? 0 : codes<DIM>() / 2;        // what is left of the row: its first or last 2 bytes
      u32 words[WORDS];
#pragma unroll
      for (u32 i = 0; i < WORDS; i++) words[i] = own[i * 2] | (u32)own[i * 2 + 1] << 16;
      const u16 rest = from[edge];
      kv_syncwarp();
      u8* const to = rows + row * row_bytes<DIM>();
#pragma unroll
      for (u32 i = 0; i < WORDS; i++) ((u32*)(to + odd * 2))[t * WORDS + i] = words[i];
      if (t == 0) ((u16*)to)[edge] = rest;
      kv_syncwarp();
    }
  }

  static KV_DEV void multiply_all(const u32 (&a)[VALUES][4], const u32 (&b0)[VALUES], const u32 (&b1)[VALUES],
                                  float (&s)[4]) {
    if constexpr (VALUES == 1) {
      kv_mma(KvF16(), s, a[0], b0[0], b1[0]);
    } else {
      kv_mma(KvF16(), s, a[0], b0[0], b0[1]);
      kv_mma(KvF16(), s, a[1], b1[0], b1[1]);
    }
  }
  // Accumulates the scores of a run of codes. `own` is the address of the row of this lane's first
  // even token.
  template <int DIM, int BASE, bool LOW, class Query>
  static KV_DEV void score_run(const C& decoder, const Query& query, u32 own, u32 lane, float (&s)[4][4]) {
    constexpr int RUN = kv_decode_run(DIM - BASE);
    constexpr u32 WORDS = RUN / VALUES / 16;
    static_assert(WORDS > 0, "whole words of codes for each of four lanes");
    const u32 at = own + BASE / VALUES + (lane & 3) * WORDS * 4;
    u32 carry[2][VALUES];  // the codes of odd tokens that the last word has of the next
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      u32 word, before[VALUES];
      kv_lds_at(at + half * 16 * row_bytes<DIM>() + row_bytes<DIM>() - 2, word);
      decoder.quads(word, before, carry[half]);
    }
    // Further unrolling would preload queries of long rows from shared memory into registers.
    [[maybe_unused]] constexpr int steps = DIM >= 256 ? 2 : DIM >= 192 && WORDS > 4 ? 4 : WORDS;
#pragma unroll steps
    for (u32 i = 0; i < WORDS; i++) {
      u32 a[VALUES][4], low[VALUES][4];
#pragma unroll
      for (u32 v = 0; v < VALUES; v++) {
        query.get(BASE / 16 + i * VALUES + v, lane, a[v]);
        if (LOW && query.has_low) query.get_low(BASE / 16 + i * VALUES + v, lane, low[v]);
      }
#pragma unroll
      for (u32 n = 0; n < 4; n++) {
        const u32 row = n / 2 * 16 + n % 2;
        u32 word, b[2][VALUES];
        kv_lds_at(at + row * row_bytes<DIM>() + n % 2 * 2 + i * 4, word);
        if (n % 2 == 0) {
          decoder.quads(word, b[0], b[1]);
        } else {
          u32 after[VALUES];
          decoder.quads(word, b[1], after);
#pragma unroll
          for (u32 v = 0; v < VALUES; v++) b[0][v] = carry[n / 2][v], carry[n / 2][v] = after[v];
        }
        multiply_all(a, b[0], b[1], s[n]);
        if (LOW && query.has_low) multiply_all(low, b[0], b[1], s[n]);
      }
    }
    if constexpr (BASE + RUN < DIM) score_run<DIM, BASE + RUN, LOW>(decoder, query, own, lane, s);
  }
  // Computes Q K^T of a subtile.
  template <int DIM, class Query>
  static KV_DEV void scores(const Query& query, u32 k_rows, u32 lane, float (&s)[4][4]) {
#pragma unroll
    for (u32 n = 0; n < 4; n++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) s[n][j] = 0.f;
    const C decoder = C::in_registers();
    const u32 own = k_rows + ((lane >> 3) * 2 + (lane >> 2 & 1) * 8) * row_bytes<DIM>();
    // Long rows, whose loop is not unrolled, decide in the loop.
    if (DIM >= 192 || query.has_low) score_run<DIM, 0, true>(decoder, query, own, lane, s);
    else score_run<DIM, 0, false>(decoder, query, own, lane, s);
    multiply(scale<DIM>(k_rows, lane), lane, s);
  }
  // Multiplies the column of each token by its factor, which lane `token` holds.
  static KV_DEV void multiply(float own, u32 lane, float (&s)[4][4]) {
#pragma unroll
    for (u32 n = 0; n < 4; n++)
#pragma unroll
      for (u32 j = 0; j < 2; j++) {
        const float factor = kv_shflf(own, token(n, j) + (lane & 3) * 2);
        s[n][j] *= factor;
        s[n][j + 2] *= factor;
      }
  }

  // Accumulates two bytes of a row for four tokens: `a` and `b` each have byte 0 of two tokens in
  // the low half, byte 1 in the high half.
  template <int FIRST, int N>
  static KV_DEV void sum_two(const C& decoder, const u32 (&weights)[4], u32 a, u32 b, float (&o)[N][4]) {
    u32 x[2][VALUES], y[2][VALUES];
    decoder.quads(a, x[0], x[1]);
    decoder.quads(b, y[0], y[1]);
#pragma unroll
    for (u32 i = 0; i < 2; i++)
#pragma unroll
      for (u32 v = 0; v < VALUES; v++) kv_mma(KvF16(), o[FIRST + i * VALUES + v], weights, x[i][v], y[i][v]);
  }
  // Accumulates word `AT / 4` of a run, of which each lane has `WIDTH` bytes. `own` is the address of
  // this lane's part in its first even row: rows 0, 1, 8 and 9 from there are its tokens. `odd` has
  // the words of the odd rows that begin 2 bytes before.
  template <int DIM, int BASE, int WIDTH, int AT>
  static KV_DEV void sum_word(const C& decoder, const u32 (&weights)[4], u32 own, u32 (&odd)[2], float (&o)[DIM / 8][4]) {
    constexpr u32 ROW = row_bytes<DIM>(), FIRST = BASE / 8 + AT;
    u32 even[2], next[2];
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      kv_lds_at(own + r * 8 * ROW + AT, even[r]);
      kv_lds_at(own + r * 8 * ROW + ROW + 2 + AT, next[r]);
    }
    sum_two<FIRST * VALUES>(decoder, weights, kv_prmt(even[0], even[1], 0x5140), kv_prmt(odd[0], odd[1], 0x7362), o);
    sum_two<(FIRST + 2) * VALUES>(decoder, weights, kv_prmt(even[0], even[1], 0x7362), kv_prmt(next[0], next[1], 0x5140), o);
    if constexpr (AT + 4 < WIDTH) sum_word<DIM, BASE, WIDTH, AT + 4>(decoder, weights, own, next, o);
  }
  template <int DIM, int BASE>
  static KV_DEV void sum_run(const C& decoder, const u32 (&weights)[4], u32 rows, u32 g, float (&o)[DIM / 8][4]) {
    constexpr u32 RUN = kv_decode_run(codes<DIM>() - BASE), WIDTH = RUN / 8, ROW = row_bytes<DIM>();
    const u32 own = rows + BASE + g * WIDTH;
    if constexpr (WIDTH == 2) {
      u16 x[4];
#pragma unroll
      for (u32 r = 0; r < 4; r++) kv_lds_at(own + (r % 2 * 8 + r / 2) * ROW, x[r]);
      sum_two<BASE / 8 * VALUES>(decoder, weights, kv_prmt(x[0], x[1], 0x5140), kv_prmt(x[2], x[3], 0x5140), o);
    } else {
      u32 odd[2];
#pragma unroll
      for (u32 r = 0; r < 2; r++) kv_lds_at(own + r * 8 * ROW + ROW - 2, odd[r]);
      sum_word<DIM, BASE, WIDTH, 0>(decoder, weights, own, odd, o);
    }
    if constexpr (BASE + RUN < codes<DIM>()) sum_run<DIM, BASE + RUN>(decoder, weights, rows, g, o);
  }
  template <int DIM>
  static KV_DEV void sum(const u32 (&weights)[2][4], u32 v_rows, u32 lane, float (&o)[DIM / 8][4]) {
    const C decoder = C::in_registers();
    // The longest rows have no registers for the addresses of both halves.
    [[maybe_unused]] constexpr int halves = DIM >= 256 ? 1 : 2;
#pragma unroll halves
    for (u32 half = 0; half < 2; half++) {
      u32 own[4];
#pragma unroll
      for (u32 r = 0; r < 4; r++) own[r] = half == 0 ? weights[0][r] : weights[1][r];
      sum_run<DIM, 0>(decoder, own, v_rows + (half * 16 + (lane & 3) * 2) * row_bytes<DIM>(), lane >> 2, o);
    }
  }
};

// Decoders of codes. prmt takes one constant, and its selector is another: `in_registers` returns a
// decoder whose other constants pass through a shuffle, without which the compiler would load one of
// the two for almost every prmt.

// One-byte codes, decoded by `C` as in KvDecodeCodes.
template <class C> struct KvRowOf {
  static constexpr int VALUES = 1;
  static constexpr float LEVEL_SCALE = 1.f;
  static KV_DEV KvRowOf in_registers() { return {}; }
  KV_DEV void pairs(u32 x, u32 (&out)[1]) const { out[0] = C::pair(x); }
  KV_DEV void quads(u32 x, u32 (&low)[1], u32 (&high)[1]) const { C::pairs(x, low[0], high[0]); }
};
struct KvRowInt8 {
  static constexpr int VALUES = 1;
  static constexpr float LEVEL_SCALE = 1.f;
  u32 exponents = KV_INT8_EXPONENTS;
  static KV_DEV KvRowInt8 in_registers() { return {kv_shfl(KV_INT8_EXPONENTS, 0)}; }
  KV_DEV void pairs(u32 x, u32 (&out)[1]) const { out[0] = kv_int8x2_f16x2(x); }
  KV_DEV void quads(u32 x, u32 (&low)[1], u32 (&high)[1]) const { kv_int8x4_f16x2(x, low[0], high[0], exponents); }
};

// l4: decodes the lower two bytes to the f16 of their low nibbles and of their high nibbles. Levels
// are those of KV_BOOK4 divided by LEVEL_SCALE, which was chosen so that rounding them to f16 costs
// little: 1 / 10,800 of a level.
struct KvRowL4 {
  static constexpr int VALUES = 2;
  static constexpr float LEVEL_SCALE = 0.74970859f;
  // The lower and upper bytes of the f16 levels are two tables of 8 bytes, which prmt indexes by the
  // magnitudes. Here are the first four bytes of each.
  u32 low_bytes = 0x0702247bu, high_bytes = 0x3d3b3831u;
  static KV_DEV KvRowL4 in_registers() { return {kv_shfl(0x0702247bu, 0), kv_shfl(0x3d3b3831u, 0)}; }

  // Decodes four codes: the lower four nibbles of `magnitudes`, the upper bits of the bytes of `signs`.
  KV_DEV void levels(u32 magnitudes, u32 signs, u32 (&out)[2]) const {
    const u32 low = kv_prmt_table(low_bytes, 0x4a8551b4u, magnitudes);
    const u32 high = kv_prmt_table(high_bytes, 0x4341403eu, magnitudes) | (signs & 0x80808080u);
    out[0] = kv_prmt(low, high, 0x6240);
    out[1] = kv_prmt(low, high, 0x7351);
  }
  KV_DEV void pairs(u32 x, u32 (&out)[2]) const { levels(x & 0x7777u, kv_prmt(x << 4, x, 0x5140), out); }
  KV_DEV void quads(u32 x, u32 (&low)[2], u32 (&high)[2]) const {
    const u32 magnitudes = x & 0x77777777u;
    levels(magnitudes, kv_prmt(x << 4, x, 0x5140), low);
    levels(magnitudes >> 16, kv_prmt(x << 4, x, 0x7362), high);
  }
};
