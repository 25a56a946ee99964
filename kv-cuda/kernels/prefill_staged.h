// The sources of prefill.h for codes of the usual formats, the same for K and V. Codes are copied
// to shared memory by cp.async, each row by the warp that then decodes it to f16 levels in the memory
// of the next tile, while other warps compute with the present one: one barrier per tile, and codes of
// the tile after next in flight. A lane decodes 32 codes at a time in straight lines. Short tiles of
// 4,096 values of K leave room for both, and registers for two mma tiles of rows per warp, which share
// what is decoded.
//
//   KvStagedCodes  one-byte codes with a calibrated scale: e4m3, e5m2, int8
//   KvStagedRows   the same with a scale per row
//   KvStagedL4     l4
//
// Rows with a scale are 2-byte aligned. As in decode_rows.h, every 16-byte chunk that contains a
// byte of a row is copied, and a lane reads its codes as aligned words, of which prmt combines two.
// With contiguous rows, these reads have no bank conflicts.
//
// A calibrated scale is a factor of all scores, or of the output. The scale of a K row multiplies
// the token's scores. The scale of a V row is a factor of its weights, added to exponents as its
// logarithm: weights are then relative to the largest product of weight and scale, and at most 1.
// The sum of weights adds each divided by the scale. All scales are relative to a power of two, that
// of rows whose largest value is about 4, so that logarithms are small: exponents of small scales
// would leave f32 few bits for the log-sum-exp. It depends on the format alone: results must not
// depend on other queries. Scales that have no logarithm, or an infinite one, multiply the levels
// instead. A scale of 0, that of a row of zeros, counts as one below all others, so that the weight of
// its token does not hide those of others.
//
// Supported calls, otherwise as in prefill_coded.h:
//   - K and V have one of these formats, and no row is in 16 bits: no full-precision prefix, no tail;
//   - no soft cap, and the scale of scores is positive;
//   - head_dim is 64 or 128;
//   - blocks begin and end at 16 bytes, as do rows without a scale.
//
// Entries and launch are as in prefill.h, for `prefill_codes_{D}`, `prefill_rows_{D}` and
// `prefill_l4_{D}`, with C bytes of codes in a row and
//   shared bytes: 2 D (R + 4 N) + 2 N (C + 16) + 56 N + 8 R + 32, N = 4096 / D
#pragma once
#include "decode_rows.h"
#include "format.h"
#include "prefill.h"
#include "prefill_queries.h"

// A format: calls `decode` with the decoder of its codes.
struct KvStagedCodes {
  static constexpr u32 VALUES = 1;  // per byte
  static constexpr bool SCALED = false;
  static constexpr float LEVEL_SCALE = 1.f;
  template <class Decode> static KV_DEV void select(u32 format, Decode decode) {
    if (format <= KV_FMT_E4M3_ROW) decode(KvRowOf<KvCodeE4m3>());
    else if (format <= KV_FMT_E5M2_ROW) decode(KvRowOf<KvCodeE5m2>());
    else decode(KvRowInt8::in_registers());
  }
};
struct KvStagedRows : KvStagedCodes { static constexpr bool SCALED = true; };
struct KvStagedL4 {
  static constexpr u32 VALUES = KvRowL4::VALUES;
  static constexpr bool SCALED = true;
  static constexpr float LEVEL_SCALE = KvRowL4::LEVEL_SCALE;
  template <class Decode> static KV_DEV void select(u32, Decode decode) { decode(KvRowL4::in_registers()); }
};

// Decodes 32 codes to four chunks of f16.
template <class C> KV_DEV void kv_decode32(const C& decoder, const u32 (&words)[8], u32 (&out)[4][4]) {
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    u32 low[1], high[1];
    decoder.quads(words[i], low, high);
    out[i / 2][i % 2 * 2] = low[0], out[i / 2][i % 2 * 2 + 1] = high[0];
  }
}
// The first half of the codes is in the low nibbles.
KV_DEV void kv_decode32(const KvRowL4& decoder, const u32 (&words)[4], u32 (&out)[4][4]) {
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    u32 low[2], high[2];
    decoder.quads(words[i], low, high);
#pragma unroll
    for (u32 nth = 0; nth < 2; nth++)
      out[nth * 2 + i / 2][i % 2 * 2] = low[nth], out[nth * 2 + i / 2][i % 2 * 2 + 1] = high[nth];
  }
}

template <u32 D, class F> struct KvPrefillStaged {
  typedef KvPrefillItem<KvF16, D, kv_prefill_matrices(D), 2, 4096 / D> Item;
  static constexpr u32 M = Item::M, TOKENS = Item::TOKENS, CHUNKS = Item::CHUNKS, TILES = Item::TILES;
  static constexpr bool SCALED = F::SCALED, SCALES = true, WEIGHS = false, BIASES = SCALED, FOLDS = !SCALED;
  static constexpr u32 WARP_TOKENS = TOKENS / 4;
  static constexpr u32 CODES = D / F::VALUES, PITCH = CODES + 16;  // bytes of a row's codes; between staged rows
  static constexpr u32 WORDS = 8 / F::VALUES;                      // of 32 codes
  // Addresses of a token's rows; 0 for a token that no row of the work item sees.
  struct alignas(16) TokenRows { u64 row[2]; };
  // Staged K and V, addresses [2][TOKENS], factors [2][3][TOKENS], queries.
  static constexpr u32 ROWS_AT = 2 * TOKENS * PITCH, FACTORS_AT = ROWS_AT + 2 * TOKENS * sizeof(TokenRows);
  static constexpr u32 BYTES = FACTORS_AT + 6 * TOKENS * 4 + KvPrefillQueries<D, Item>::BYTES;

  const Item& item;
  u8* staged;         // [K, V][TOKENS] rows
  TokenRows* tokens;  // [2][TOKENS]
  float* factors;     // [2] of: [TOKENS] of scores, [TOKENS] logarithms of those of weights, [TOKENS] inverses
  KvPrefillQueries<D, Item> queries;
  u32 block;  // of the token that this lane has looked up

  KV_DEV KvPrefillStaged(const Item& item, u8* memory)
      : item(item), staged(memory), tokens((TokenRows*)(memory + ROWS_AT)), factors((float*)(memory + FACTORS_AT)),
        queries{item, factors + 6 * TOKENS} {}

  // Returns the thread by a shuffle, which keeps the compiler from holding addresses derived from it
  // for the whole kernel.
  KV_DEV u32 fresh_thread() const { return kv_shfl(item.thread, item.lane); }

  // Looks up a token of the warp per lane, as KvPrefillPlain does.
  KV_DEV static u32 token(u32 thread) { return thread / 32 * WARP_TOKENS + thread % 32; }
  KV_DEV bool looks_up(u32 tile, u32 thread) const {
    return tile != KV_NONE && thread % 32 < WARP_TOKENS && item.reaches(tile * TOKENS + token(thread));
  }
  KV_DEV void look_up(u32 tile, u32 thread) {
    if (!looks_up(tile, thread)) return;
    const u32 index = (tile * TOKENS + token(thread)) / item.p.k_plane.block_size;
    block = ((const u32*)item.p.plan.tables)[(u64)item.sequence().table + index];
  }
  KV_DEV void store_addresses(u32 tile, u32 buffer, u32 thread) const {
    const KvAttendParams& p = item.p;
    if (thread % 32 >= WARP_TOKENS) return;
    TokenRows at = {{0, 0}};
    if (looks_up(tile, thread)) {
      const KvPlace place = {0, (tile * TOKENS + token(thread)) % p.k_plane.block_size, false};
      at.row[0] = (u64)kv_block(p.k_plane, block) + kv_row_begin(p.k_plane, place, item.kv_head);
      at.row[1] = (u64)kv_block(p.v_plane, block) + kv_row_begin(p.v_plane, place, item.kv_head);
    }
    tokens[buffer * TOKENS + token(thread)] = at;
  }

  // Starts the copy of the warp's rows; zeros for a token that no row sees, whose memory is not
  // read.
  KV_DEV void copy(u32 buffer, u32 thread) const {
    constexpr u32 AT_ONCE = CODES / 16 < 8 ? CODES / 16 : 8;  // chunks of a row
    const u32 first = thread % 32 / AT_ONCE, chunk = thread % 32 % AT_ONCE;
    const TokenRows* from = tokens + buffer * TOKENS + thread / 32 * WARP_TOKENS;
    u8* const to = staged + thread / 32 * WARP_TOKENS * PITCH;
#pragma unroll
    for (u32 i = 0; i < WARP_TOKENS; i += 32 / AT_ONCE) {
      const TokenRows at = from[first + i];
#pragma unroll
      for (u32 c = 0; c < CODES / 16; c += AT_ONCE)
#pragma unroll
        for (u32 plane = 0; plane < 2; plane++)
          copy_chunk(to + plane * TOKENS * PITCH + (first + i) * PITCH, at.row[plane], chunk + c);
    }
    if (SCALED && thread % 32 < 2 * WARP_TOKENS) {
      const u32 plane = thread % 32 / WARP_TOKENS, row = thread % 32 % WARP_TOKENS;
      copy_chunk(to + plane * TOKENS * PITCH + row * PITCH, from[row].row[plane], CODES / 16);
    }
    kv_cp_commit();
  }
  KV_DEV static void copy_chunk(u8* to, u64 row, u32 chunk) {
    kv_cp_async16(to + chunk * 16, (const u8*)(SCALED ? row & ~15ull : row) + chunk * 16, row != 0);
  }

  // Decodes the warp's rows.
  template <class C> KV_DEV void decode(const C& decoder, u32 buffer, u32 thread) const {
#pragma unroll 1
    for (u32 plane = 0; plane < 2; plane++) {
#pragma unroll
      for (u32 n = 0; n < WARP_TOKENS * (D / 32) / 32; n++) {
        // Lanes that store together have eight rows.
        const u32 i = thread % 32 + n * 32, row = thread / 32 * WARP_TOKENS + i % WARP_TOKENS, run = i / WARP_TOKENS;
        const u8* from = staged + (plane * TOKENS + row) * PITCH + run * (WORDS * 4);
        u32 words[WORDS], out[4][4];
        if constexpr (SCALED) {
          const u32 begin = (u32)tokens[buffer * TOKENS + row].row[plane] & 15;
          const u32 selector = (begin & 2) != 0 ? 0x5432 : 0x3210, *aligned = (const u32*)(from + begin / 4 * 4);
          u32 word = aligned[0];
#pragma unroll
          for (u32 w = 0; w < WORDS; w++) {
            const u32 next = aligned[w + 1];
            words[w] = kv_prmt(word, next, selector);
            word = next;
          }
        } else {
#pragma unroll
          for (u32 w = 0; w < WORDS; w += 4) {
            const KvWord4 four = ((const KvWord4*)from)[w / 4];
            words[w] = four.x, words[w + 1] = four.y, words[w + 2] = four.z, words[w + 3] = four.w;
          }
        }
        kv_decode32(decoder, words, out);
        u8* const tile = (plane == 0 ? item.k : item.v) + Item::tile_at(buffer);
        const u32 to = Item::at(row, run * 4);
#pragma unroll
        for (u32 c = 0; c < 4; c++)
          *(KvWord4*)(tile + Item::swizzled(to, c)) = {out[c][0], out[c][1], out[c][2], out[c][3]};
      }
    }
  }

  // Returns the power of two to which scales of V are relative, as its exponent plus 127.
  KV_DEV u32 common() const {
    const u32 format = item.p.v_plane.format;
    return format == KV_FMT_E5M2_ROW ? 113 : format == KV_FMT_E4M3_ROW ? 120 : format == KV_FMT_INT8_ROW ? 122 : 127;
  }

  // Reads the scales of the warp's rows. Returns the scale of a V row that must multiply the levels
  // of lane's row, otherwise 1.
  KV_DEV float read_scales(u32 buffer, u32 thread) const {
    if (thread % 32 >= 2 * WARP_TOKENS) return 1.f;
    const u32 plane = thread % 32 / WARP_TOKENS, row = thread / 32 * WARP_TOKENS + thread % 32 % WARP_TOKENS;
    const u32 address = (u32)tokens[buffer * TOKENS + row].row[plane];
    const float scale = kv_half_at(staged + (plane * TOKENS + row) * PITCH + (address & 15) + CODES);
    float* const own = factors + buffer * 3 * TOKENS + row;
    if (plane == 0) {
      own[0] = scale * F::LEVEL_SCALE;
      return 1.f;
    }
    const bool is_usual = scale > 0.f && scale < kv_infinity();
    constexpr float BELOW_ALL = 1.f / (1 << 25);
    const float factor = (is_usual ? scale : scale == 0.f ? BELOW_ALL : 1.f) * F::LEVEL_SCALE;
    // Logarithms of 16 bits after the point, and the inverses of what they stand for: a log-sum-exp
    // needs a pair that fits.
    const u32 bits = kv_as_u(factor);
    const float log = kv_log(kv_as_f((bits & 0x7fffffu) | 0x3f800000u)), part = kv_rint(log * KV_LOG2E * 65536) / 65536;
    own[TOKENS] = (float)((i32)(bits >> 23) - (i32)common()) + part;
    own[2 * TOKENS] = kv_div_rn(1.f + kv_fma(-part, KV_LN2, log), factor) * kv_as_f(common() << 23);
    return is_usual || address == 0 ? 1.f : scale;
  }
  // Multiplies levels of V rows by the scales that lanes hold.
  KV_DEV void multiply(float scale, u32 buffer) const {
    u32 left = kv_ballot(scale != 1.f);
#pragma unroll 1
    while (left != 0) {
      const u32 lane = 31 - kv_clz(left), row = item.warp * WARP_TOKENS + lane % WARP_TOKENS;
      const float own = kv_shflf(scale, lane);
      left &= ~(1u << lane);
#pragma unroll 1
      for (u32 d = item.lane; d < D / 2; d += 32) {
        u32* const pair = (u32*)(item.v + Item::tile_at(buffer) + Item::at(row, d / 4) + d % 4 * 4);
        *pair = kv_pack(KvF16(), kv_f16_f((u16)*pair) * own, kv_f16_f((u16)(*pair >> 16)) * own);
      }
    }
    kv_syncwarp();
  }
  // Returns whether a value of V in the warp's rows is not finite.
  KV_DEV bool has_non_finite(u32 buffer, u32 thread) const {
    bool found = false;
    for (u32 i = thread % 32; i < WARP_TOKENS * CHUNKS; i += 32)
      found = found || item.is_non_finite(buffer, thread / 32 * WARP_TOKENS + i / CHUNKS, i % CHUNKS);
    return found;
  }

  // Prepares the first tile and starts its copy. Queries are a group of copies of their own.
  KV_DEV void begin(u32 tile) {
    queries.begin();
    const float factor = item.p.scale * KV_LOG2E * (SCALED ? 1.f : kv_constants(item.p.k_plane, item.kv_head).scale);
    if (item.lane < Item::WARP_ROWS) {
      float* const scale = queries.rows + item.warp * Item::WARP_ROWS + item.lane;
      *scale = (queries.converts() ? *scale : 1.f) * factor;
    }
    const u32 after = item.after(tile);
    look_up(tile, item.thread);
    store_addresses(tile, 0, item.thread);
    look_up(after, item.thread);
    kv_syncwarp();
    if (tile != KV_NONE) copy(0, item.thread);
    store_addresses(after, 1, item.thread);
    // The memory of K's tile may still be that of a warp's queries.
    kv_sync();
    advance(tile, after, 0);
    store_addresses(item.after(after), 0, item.thread);
  }
  // Decodes the copied rows of a tile and starts the copy of the one after it.
  KV_DEV void advance(u32 tile, u32 after, u32 buffer) {
    const u32 thread = fresh_thread();
    if (tile != KV_NONE) {
      kv_cp_wait<0>();
      kv_syncwarp();
      F::select(item.p.k_plane.format, [&](auto decoder) { decode(decoder, buffer, thread); });
      [[maybe_unused]] const float scale = SCALED ? read_scales(buffer, thread) : 1.f;
      kv_syncwarp();
      if (SCALED && kv_any(scale != 1.f)) multiply(scale, buffer);
      if (!item.is_whole(tile) && has_non_finite(buffer, thread))
        kv_atomic_max(item.state.non_finite + buffer, tile + 1);
      if (after != KV_NONE) copy(buffer ^ 1, thread);
    }
    look_up(item.after(after), thread);
  }
  // Waits, with all threads, until a tile is decoded. The previous one is not read any more, so the
  // next one is decoded in its place.
  KV_DEV void wait_for(u32, u32 after, u32 buffer, bool) {
    kv_sync();
    advance(after, item.after(after), buffer ^ 1);
  }
  // Stores the addresses of the second tile after the next one.
  KV_DEV void prepare_next(u32 after, u32 buffer) const {
    store_addresses(item.after(item.after(after)), buffer ^ 1, fresh_thread());
  }
  KV_DEV void end() const { kv_cp_wait<0>(); }

  // Returns what scales a row's scores to log2 units, and the part of its exponents that is the same
  // for all tokens and therefore left out.
  KV_DEV float score_scale(u32 m, u32 h) const { return queries.rows[item.own_row(m, h)]; }
  KV_DEV float left_out(u32 m, u32 h) const { return queries.bias(m, h) * (item.p.scale * KV_LOG2E); }

  // Returns value `j` of a lane's two tokens of mma tile `i` in list `nth` of `factors`.
  KV_DEV float of_token(u32 nth, u32 i, u32 j, u32 buffer) const {
    return factors[(buffer * 3 + nth) * TOKENS + i * 8 + item.lane % 4 * 2 + j];
  }
  // Makes exponents: scaled scores plus logarithms.
  KV_DEV void make_exponents(float (&s)[M][TILES][4], u32 buffer) const {
    float own[M][2];
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) own[m][h] = score_scale(m, h);
#pragma unroll
    for (u32 i = 0; i < TILES; i++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        const float factor = of_token(0, i, j % 2, buffer), log = of_token(1, i, j % 2, buffer);
#pragma unroll
        for (u32 m = 0; m < M; m++) s[m][i][j] = kv_fma(s[m][i][j] * factor, own[m][j / 2], log);
      }
  }
  // Adds two weights of mma tile `i` to a sum, without the factors of V.
  KV_DEV float add_weights(float sum, float low, float high, u32 i, u32 buffer) const {
    return kv_fma(low, of_token(2, i, 0, buffer), kv_fma(high, of_token(2, i, 1, buffer), sum));
  }

  KV_DEV void unify(float (&)[M][Item::COLUMNS][4]) const {}
  KV_DEV float factor(u32, u32) const {
    return SCALED ? kv_as_f(common() << 23) : kv_constants(item.p.v_plane, item.kv_head).scale;
  }
  KV_DEV void transform_output(float* row) const { queries.transform_output(row); }
};

template <u32 D, class F> KV_DEV void kv_prefill_staged(const KvPrefillParams& p) {
  kv_prefill_by<KvF16, D, KvPrefillStaged<D, F>>(p);
}
