// Rows that are not stored as the queries' own type, for prefill.h: codes of every format, with what may
// come with them. A tile of K and V goes through registers, where its bytes become levels of f16; then
// everybody waits, and makes scores, weights and sums. Two blocks of a multiprocessor do the one and the
// other at the same time.
//
// The factor of a row is not in its levels: that of K multiplies the score of its token, that of V the
// weight. Such a product may be too large or too small for f16, so all of a row of queries are kept near 1
// by a power of two, which follows the largest that there was. Queries of bf16, and such as are
// transformed because rows of K are, come to f16 by a power of two for each row; the former exactly.
// Outputs are transformed where rows of V are, as in attend.cu.
//
// Takes a call where:
//   - q and out are f16 or bf16, on multiples of 16 bytes as for KvPrefillPlain; head_dim of K and V is D,
//     one of 64, 80, 96, 128, 192, 256;
//   - rows of either plane are codes of any format, or f16; blocks have no means. Transforms, sinks in 16
//     bits and tails may be;
//   - a log-sum-exp is asked for only where K is not transformed and has levels that are exact: it is of
//     32 bits, and would show that queries or levels were rounded to 16.
// Plain rows of f32, and of bf16 beside codes, are for attend.cu: f16 has no room for them.
//
// Entries and launch as in prefill.h, for `prefill_coded_{D}`, with
//   R = 64 rows a unit
//   shared bytes: 2 D (64 + 2 N) + 64 N + 800, N = 64 tokens up to D = 128, 32 above
#pragma once
#include "find.h"
#include "prefill.h"
#include "prefill_levels.h"
#include "transform.h"

template <u32 D> struct KvPrefillCoded {
  typedef KvPrefillUnit<KvF16, D, 1, 1> Unit;
  static constexpr u32 M = Unit::M, TOKENS = Unit::TOKENS, CHUNKS = Unit::CHUNKS, TILES = Unit::TILES;
  static constexpr u32 ROWS = Unit::ROWS, WARP_ROWS = Unit::WARP_ROWS;
  static constexpr bool HAS_FACTORS = true;
  // Tokens, [2][2][TOKENS] factors, two books of 32, [2][ROWS] of query rows.
  static constexpr u32 BYTES = 2 * TOKENS * sizeof(KvCodedAt) + 4 * (4 * TOKENS + 64 + 2 * ROWS);
  const Unit& u;
  KvCodedAt* tokens;  // [2][TOKENS]
  float* factors;  // [2][K, V][TOKENS]
  float* books;    // [K, V][32]
  float* queries;  // [ROWS] what products with a row are multiplied with, [ROWS] what is added then
  float given[2];  // scales of the planes
  bool even;       // the factor of V is `given` for every token
  // What products with a row's levels of K, and weights for levels of V, are multiplied with; the largest
  // weight so far, without it.
  float inverse[M][2], bias[M][2], power[M][2], most[M][2];

  KV_DEV KvPrefillCoded(const Unit& unit, u8* memory) : u(unit) {
    tokens = (KvCodedAt*)memory;
    factors = (float*)(tokens + 2 * TOKENS);
    books = factors + 4 * TOKENS;
    queries = books + 64;
    const KvPlane &k = u.p.k_plane, &v = u.p.v_plane;
    given[0] = kv_constants(k, u.kv_head).scale;
    given[1] = kv_constants(v, u.kv_head).scale;
    even = v.sinks == 0 && v.has_tail == 0 && has_given_factor(v.format);
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) power[m][h] = 1.f, most[m][h] = 0.f;
  }

  // Whether all rows of a head have one factor.
  KV_DEV static bool has_given_factor(u32 format) {
    const bool row = format == KV_FMT_Q8_0 || format == KV_FMT_Q4_0 || format == KV_FMT_E4M3_ROW || format == KV_FMT_E5M2_ROW || format == KV_FMT_INT8_ROW ||
                     format == KV_FMT_L6 || format == KV_FMT_L4 || format == KV_FMT_L3;
    return !row;
  }

  KV_DEV void look_up(u32 tile, u32 buffer) const {
    if (tile == KV_NONE || u.thread >= TOKENS) return;
    const u32 position = tile * TOKENS + u.thread;
    KvCodedAt at = {{0, 0}, 0, 0};
    float own[2] = {1.f, 1.f};
    if (u.reaches(position)) {
      const KvTokenAt found = kv_find(u.p, u.sequence(), u.kv_head, position);
      at = {{found.k, found.v}, found.wide, 0};
      const KvPlane &k = u.p.k_plane, &v = u.p.v_plane;
      if (found.wide == 0) {
        own[0] = kv_row_factor(k.format, (const u8*)found.k, k.scales_begin, given[0], D);
        own[1] = kv_row_factor(v.format, (const u8*)found.v, v.scales_begin, given[1], D);
      } else {
        own[1] = kv_wide_factor(v.format, (const u8*)found.v, D);
      }
    }
    tokens[buffer * TOKENS + u.thread] = at;
    factors[buffer * 2 * TOKENS + u.thread] = own[0];
    factors[(buffer * 2 + 1) * TOKENS + u.thread] = own[1];
  }

  KV_DEV void stage(u32 tile, u32 buffer) const {
    const KvPlane &k = u.p.k_plane, &v = u.p.v_plane;
    const u32 start = tile * TOKENS;
    const bool has_wide = start < k.sinks || start + TOKENS > kv_tail_begin(k, u.sequence().kv_len, u.sequence().coded);
    const KvCodedTile all = {tokens + buffer * TOKENS, factors + buffer * 2 * TOKENS, books, {u.k, u.v},
                             {k.format, v.format}, {k.scales_begin, v.scales_begin}, TOKENS, CHUNKS, has_wide};
    kv_decode_tile(all);
  }

  KV_DEV void begin(u32 tile) {
    look_up(tile, 0);
    if (u.thread < 64)
      books[u.thread] =
          kv_book_entry(u.thread < 32 ? u.p.k_plane.format : u.p.v_plane.format, u.thread % 32);
    const bool converts = u.p.k_plane.transforms != 0 || u.p.q.dtype != KV_F16;
    if (converts) {
      const KvConstants constants = kv_constants(u.p.k_plane, u.kv_head);
      float* row = (float*)u.k + u.warp * D;
#pragma unroll 1
      for (u32 i = u.warp * WARP_ROWS; i < (u.warp + 1) * WARP_ROWS; i++) convert(i, row, constants);
      kv_syncwarp();
    } else {
      u.copy_queries();
      kv_cp_commit();
    }
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        inverse[m][h] = converts ? queries[u.own_row(m, h)] : 1.f;
        bias[m][h] = converts ? queries[ROWS + u.own_row(m, h)] : 0.f;
      }
  }

  // Brings query row `i` of the unit, a warp together, by way of `row`.
  KV_DEV void convert(u32 i, float* row, const KvConstants& constants) const {
    const bool transforms = u.p.k_plane.transforms != 0;
    float mean = 0.f, large = 0.f, into = 1.f, back = 1.f;
    const bool is_there = i < u.rows();
    const u8* from = u.row_of(u.p.q, is_there ? i : 0);
    for (u32 d = u.lane; d < D; d += 32) {
      row[d] = is_there ? kv_load(u.p.q.dtype, from, d) : 0.f;
      if (transforms) mean += row[d] * constants.mean[d];
    }
    if (transforms) kv_transform_query(row, constants.back, D, u.lane);
    kv_syncwarp();
    for (u32 d = u.lane; d < D; d += 32) large = kv_max(large, kv_abs(row[d]));
    mean = kv_warp_sum(mean);
    large = kv_warp_max(large);
    // The largest becomes 256 to 512, unless it is next to nothing, or infinite.
    const u32 exponent = kv_as_u(large) >> 23;
    if (exponent >= 9 && exponent < 255) {
      into = kv_as_f((262 - exponent) << 23);
      back = kv_as_f((exponent - 8) << 23);
    }
    for (u32 d = u.lane; d < D / 2; d += 32)
      *(u32*)(u.q + Unit::at(i, d / 4) + d % 4 * 4) = kv_pack(KvF16(), row[2 * d] * into, row[2 * d + 1] * into);
    if (u.lane == 0) queries[i] = back, queries[ROWS + i] = mean;
    kv_syncwarp();
  }

  KV_DEV void have(u32 tile, u32 after, u32 buffer, bool whole) const {
    kv_cp_wait<0>();
    kv_sync();
    stage(tile, buffer);
    if (!whole) {
      // What this thread has decoded.
      bool found = false;
      for (u32 i = u.thread; i < TOKENS * CHUNKS; i += KV_PREFILL_THREADS)
        found = found || u.is_broken(0, i / CHUNKS, i % CHUNKS);
      const u32 factor = u.thread < TOKENS ? kv_as_u(factors[(buffer * 2 + 1) * TOKENS + u.thread]) : 0;
      if (found || (factor & 0x7f800000u) == 0x7f800000u) kv_atomic_max(u.notes.broken + buffer, tile + 1);
    }
    kv_sync();
    look_up(after, buffer ^ 1);
  }
  KV_DEV void follow(u32, u32) const {}
  KV_DEV void end() const { kv_cp_wait<0>(); }

  KV_DEV void scale(float (&s)[M][TILES][4], float scale, u32 buffer) const {
    const float* own = factors + buffer * 2 * TOKENS + u.lane % 4 * 2;
#pragma unroll
    for (u32 i = 0; i < TILES; i++) {
      const float low = own[i * 8], high = own[i * 8 + 1];
#pragma unroll
      for (u32 m = 0; m < M; m++)
#pragma unroll
        for (u32 j = 0; j < 4; j++)
          s[m][i][j] = kv_fma(s[m][i][j] * (j % 2 == 0 ? low : high), scale * inverse[m][j / 2], scale * bias[m][j / 2]);
    }
  }

  // Makes weights, which are added to `total`, and multiplies them with the factors of V; whether sums relative to
  // `before` stay. One that is not seen and has a factor that is no number becomes no number: only values that are
  // seen are summed then.
  KV_DEV bool weigh(float (&s)[M][TILES][4], const float (&largest)[M][2], float (&total)[M][2], float (&before)[M][2],
                    u32 buffer) {
    const float* own = factors + (buffer * 2 + 1) * TOKENS + u.lane % 4 * 2;
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
            if (even) continue;
            s[m][i][j] *= own[i * 8 + j % 2];
            next[m][h] = kv_max(next[m][h], kv_abs(s[m][i][j]));
          }
        total[m][h] += added;
      }
    if (even) return true;
    bool same = true;
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        next[m][h] = kv_max(next[m][h], kv_shfl_xorf(next[m][h], 1));
        next[m][h] = kv_max(next[m][h], kv_shfl_xorf(next[m][h], 2));
        most[m][h] = kv_max(most[m][h] * before[m][h], next[m][h]);
        // The largest becomes 1 to 2, within 60 powers of two.
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

  // What sums of weighed values are multiplied with.
  KV_DEV float factor(u32 m, u32 h) const {
    return even ? kv_row_factor(u.p.v_plane.format, nullptr, 0, given[1], D) : kv_power_inverse(power[m][h]);
  }
  KV_DEV u32 output(float low, float high) const {
    return u.p.out.dtype == KV_F16 ? kv_pack(KvF16(), low, high) : kv_pack(KvBf16(), low, high);
  }
  KV_DEV bool turns() const { return u.p.v_plane.transforms != 0; }
  KV_DEV void turn(float* row) const {
    kv_transform_output(row, kv_constants(u.p.v_plane, u.kv_head).back, D, u.lane);
  }
};

template <u32 D> KV_DEV void kv_prefill_coded(const KvAttendParams& p) {
  kv_prefill_by<KvF16, D, KvPrefillCoded<D>>(p);
}
