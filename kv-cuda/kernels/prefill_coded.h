// The source of prefill.h for codes of every format. A tile of K and V passes through registers,
// which decode it to f16 levels in shared memory; after a barrier, all warps compute scores,
// weights and sums. Two thread blocks on a multiprocessor overlap the two phases.
//
// Levels do not include the factor of their row: that of K multiplies the token's scores, that of V
// its weights. Weights times factors may exceed the range of f16, so those of a query row are kept
// near 1 by a power of two that follows the largest product so far. Queries in bf16, and queries
// that are transformed because K is, are scaled to f16 by a power of two per row; bf16 values
// exactly. If V is transformed, the output is transformed back, as in attend.cu.
//
// Supported calls:
//   - q and out are f16 or bf16, with addresses and strides as for KvPrefillPlain; head_dim of K
//     and V is D: 64, 80, 96, 128, 192 or 256;
//   - rows of either plane are codes of any format, or f16; no block means. Transforms, a
//     full-precision prefix and tails are supported;
//   - with a log-sum-exp, K is not transformed and its levels are exact in f16: the f32 result
//     would show the rounding of queries or levels.
// Rows in f32, and rows in bf16 next to codes, are left to attend.cu: f16 cannot represent them.
//
// Entries and launch are as in prefill.h, for `prefill_coded_{D}`, with
//   R = 64 rows per work item
//   shared bytes: 2 D (64 + 2 N) + 64 N + 800, N = 64 tokens up to D = 128, 32 above
#pragma once
#include "token_rows.h"
#include "prefill.h"
#include "prefill_levels.h"
#include "prefill_queries.h"

template <u32 D> struct KvPrefillCoded {
  typedef KvPrefillItem<KvF16, D, 1, 1> Item;
  static constexpr u32 M = Item::M, TOKENS = Item::TOKENS, CHUNKS = Item::CHUNKS, TILES = Item::TILES;
  static constexpr bool SCALES = true, WEIGHS = true, BIASES = false, FOLDS = false;
  // Addresses of tokens, [2][2][TOKENS] factors, two codebooks of 32, [2][ROWS] of query rows.
  static constexpr u32 BYTES =
      2 * TOKENS * sizeof(KvCodedRows) + 4 * (4 * TOKENS + 64) + KvPrefillQueries<D, Item>::BYTES;
  const Item& item;
  KvCodedRows* tokens;    // [2][TOKENS]
  float* factors;         // [2][K, V][TOKENS]
  float* books;           // [K, V][32]
  KvPrefillQueries<D, Item> queries;
  float plane_scales[2];  // calibrated scales of K and V
  bool is_uniform;        // the factor of V is the same for every token
  // Per query row: factor and bias of its scores, power of two of its weights, and the largest
  // weight so far without that power.
  float inverse[M][2], bias[M][2], power[M][2], most[M][2];

  KV_DEV KvPrefillCoded(const Item& item, u8* memory) : item(item), queries{item, nullptr} {
    tokens = (KvCodedRows*)memory;
    factors = (float*)(tokens + 2 * TOKENS);
    books = factors + 4 * TOKENS;
    queries.rows = books + 64;
    const KvPlane &k = item.p.k_plane, &v = item.p.v_plane;
    plane_scales[0] = kv_constants(k, item.kv_head).scale;
    plane_scales[1] = kv_constants(v, item.kv_head).scale;
    is_uniform = v.full_precision_prefix == 0 && v.has_tail == 0 && has_uniform_factor(v.format);
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) power[m][h] = 1.f, most[m][h] = 0.f;
  }

  // Returns whether all rows of a head have the same factor.
  KV_DEV static bool has_uniform_factor(u32 format) {
    const bool row = format == KV_FMT_Q8_0 || format == KV_FMT_Q4_0 || format == KV_FMT_E4M3_ROW ||
                     format == KV_FMT_E5M2_ROW || format == KV_FMT_INT8_ROW ||
                     format == KV_FMT_L6 || format == KV_FMT_L4 || format == KV_FMT_L3;
    return !row;
  }

  KV_DEV void look_up(u32 tile, u32 buffer) const {
    if (tile == KV_NONE || item.thread >= TOKENS) return;
    const u32 position = tile * TOKENS + item.thread;
    KvCodedRows at = {{0, 0}, 0, 0};
    float own[2] = {1.f, 1.f};
    if (item.reaches(position)) {
      const KvTokenRows found = kv_token_rows(item.p, item.sequence(), item.kv_head, position);
      at = {{found.k, found.v}, found.wide, 0};
      const KvPlane &k = item.p.k_plane, &v = item.p.v_plane;
      if (found.wide == 0) {
        own[0] = kv_row_factor(k.format, (const u8*)found.k, k.scales_begin, plane_scales[0], D);
        own[1] = kv_row_factor(v.format, (const u8*)found.v, v.scales_begin, plane_scales[1], D);
      } else {
        own[1] = kv_wide_factor(v.format, (const u8*)found.v, D);
      }
    }
    tokens[buffer * TOKENS + item.thread] = at;
    factors[buffer * 2 * TOKENS + item.thread] = own[0];
    factors[(buffer * 2 + 1) * TOKENS + item.thread] = own[1];
  }

  KV_DEV void stage(u32 tile, u32 buffer) const {
    const KvPlane &k = item.p.k_plane, &v = item.p.v_plane;
    const u32 start = tile * TOKENS;
    const u32 tail = kv_tail_begin(k, item.sequence().kv_len, item.sequence().coded);
    const bool has_wide = start < k.full_precision_prefix || start + TOKENS > tail;
    const KvCodedTile all = {tokens + buffer * TOKENS, factors + buffer * 2 * TOKENS, books, {item.k, item.v},
                             {k.format, v.format}, {k.scales_begin, v.scales_begin}, TOKENS, CHUNKS, has_wide};
    kv_decode_tile(all);
  }

  KV_DEV void begin(u32 tile) {
    look_up(tile, 0);
    if (item.thread < 64)
      books[item.thread] =
          kv_book_entry(item.thread < 32 ? item.p.k_plane.format : item.p.v_plane.format, item.thread % 32);
    queries.begin();
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        inverse[m][h] = queries.scale(m, h);
        bias[m][h] = queries.bias(m, h);
      }
  }

  KV_DEV void wait_for(u32 tile, u32 after, u32 buffer, bool whole) const {
    kv_cp_wait<0>();
    kv_sync();
    stage(tile, buffer);
    if (!whole) {
      // Checks the values that this thread may have decoded.
      bool found = false;
      for (u32 i = item.thread; i < TOKENS * CHUNKS; i += KV_PREFILL_THREADS)
        found = found || item.is_non_finite(0, i / CHUNKS, i % CHUNKS);
      const u32 factor = item.thread < TOKENS ? kv_as_u(factors[(buffer * 2 + 1) * TOKENS + item.thread]) : 0;
      if (found || (factor & 0x7f800000u) == 0x7f800000u) kv_atomic_max(item.state.non_finite + buffer, tile + 1);
    }
    kv_sync();
    look_up(after, buffer ^ 1);
  }
  KV_DEV void prepare_next(u32, u32) const {}
  KV_DEV void end() const { kv_cp_wait<0>(); }

  KV_DEV void scale(float (&s)[M][TILES][4], float scale, u32 buffer) const {
    const float* own = factors + buffer * 2 * TOKENS + item.lane % 4 * 2;
#pragma unroll
    for (u32 i = 0; i < TILES; i++) {
      const float low = own[i * 8], high = own[i * 8 + 1];
#pragma unroll
      for (u32 m = 0; m < M; m++)
#pragma unroll
        for (u32 j = 0; j < 4; j++)
          s[m][i][j] = kv_fma(s[m][i][j] * (j % 2 == 0 ? low : high), scale * inverse[m][j / 2],
                              scale * bias[m][j / 2]);
    }
  }

  // Turns scores into weights, adds them to `total`, and multiplies them by the factors of V.
  // Returns whether the scale of weights, and so of sums, stays; otherwise includes its change in
  // `before`. A masked weight times a non-finite factor is NaN; such tiles are summed by
  // sum_visible.
  KV_DEV bool scale_weights(float (&s)[M][TILES][4], const float (&largest)[M][2], float (&total)[M][2],
                            float (&before)[M][2], u32 buffer) {
    const float* own = factors + (buffer * 2 + 1) * TOKENS + item.lane % 4 * 2;
    float next[M][2];
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        next[m][h] = 0.f;
        float added = 0.f;
#pragma unroll
        for (u32 i = 0; i < TILES; i++)
#pragma unroll
          for (u32 j = 2 * h; j < 2 * h + 2; j++) {
            s[m][i][j] = kv_exp2(s[m][i][j] - largest[m][h]);
            added += s[m][i][j];
            if (is_uniform) continue;
            s[m][i][j] *= own[i * 8 + j % 2];
            next[m][h] = kv_max(next[m][h], kv_abs(s[m][i][j]));
          }
        total[m][h] += added;
      }
    if (is_uniform) return true;
    bool same = true;
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        next[m][h] = kv_max(next[m][h], kv_shfl_xorf(next[m][h], 1));
        next[m][h] = kv_max(next[m][h], kv_shfl_xorf(next[m][h], 2));
        most[m][h] = kv_max(most[m][h] * before[m][h], next[m][h]);
        // Scales the largest to between 1 and 2, by at most 60 powers of two.
        const u32 exponent = kv_as_u(most[m][h]) >> 23;
        const float wanted = exponent == 0 ? power[m][h] : kv_as_f((254 - kv_clamped(exponent)) << 23);
        same = same && wanted == power[m][h];
        before[m][h] *= wanted * kv_power_inverse(power[m][h]);
        power[m][h] = wanted;
#pragma unroll
        for (u32 i = 0; i < TILES; i++) s[m][i][2 * h] *= wanted, s[m][i][2 * h + 1] *= wanted;
      }
    return same;
  }
  KV_DEV static u32 kv_clamped(u32 exponent) { return exponent < 67 ? 67 : exponent > 187 ? 187 : exponent; }

  // Gives the sums of all splits of a query tile the same scale.
  KV_DEV void unify(float (&o)[M][Item::COLUMNS][4]) {
    if (is_uniform) return;
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        const float inverse = kv_power_inverse(power[m][h]);
        power[m][h] = 1.f;
#pragma unroll
        for (u32 d = 0; d < Item::COLUMNS; d++) o[m][d][2 * h] *= inverse, o[m][d][2 * h + 1] *= inverse;
      }
  }
  // Returns the factor of sums of scaled weights times levels.
  KV_DEV float factor(u32 m, u32 h) const {
    return is_uniform ? kv_row_factor(item.p.v_plane.format, nullptr, 0, plane_scales[1], D)
                      : kv_power_inverse(power[m][h]);
  }
  KV_DEV float score_scale(u32, u32) const { return 1.f; }
  KV_DEV float left_out(u32, u32) const { return 0.f; }
  KV_DEV void transform_output(float* row) const { queries.transform_output(row); }
};

template <u32 D> KV_DEV void kv_prefill_coded(const KvPrefillParams& p) {
  kv_prefill_by<KvF16, D, KvPrefillCoded<D>>(p);
}
