// Attention of many queries over cached rows by tensor cores. Dao, "FlashAttention-2" (2023), over pages.
//
// A unit is R rows of one kv head: a row is one head of one query, rows of a sequence are numbered query by
// query, so that heads of a group share what is read. Each of four warps has a quarter of them. Up to D = 128
// that is two matrices of 16, R = 128: whatever a warp loads of K and V from shared memory feeds both, or else
// these loads would take longer than the products. Above, one is what registers have room for, R = 64.
// All warps share tiles of K and V, which a source brings to shared memory as T = f16 or bf16: here
// KvPrefillPlain, for rows that are stored as the queries' own type, by asynchronous copies of a whole tile
// while the one before is worked on, with one barrier a tile. prefill_coded.h has the source for codes.
// Contexts are not cut.
//
// With KvPrefillPlain it takes a call where, for both planes:
//   - q, out and the planes' rows are T; head_dim of K and V is D, one of 64, 80, 96, 128, 192, 256;
//   - neither plane transforms; no sinks in 16 bits, no tail, no block means;
//   - every address (q, out, planes, segments) and every stride (of q, out; token, head and block of
//     planes) is a multiple of 16 bytes.
// Of such a call it takes the entries with q_len_min..=q_len_max queries, which must not be cut: those
// with more than 8 queries never are. Others are for another launch of the same call.
//
// Launch `prefill_{f16,bf16}_{D}`:
//   grid x: floor(total_q * group / R) + sequences; y: kv heads; z: 1
//   threads: 128
//   shared bytes: 2 D (R + 4 N) + 32 N + 32, N = 64 tokens up to D = 128, 32 above
// part_rows, part_stats, part_index and counters are not used. Rows that no query owns are not touched.
#pragma once
#include "prefill_unit.h"

// Matrices of 16 rows a warp.
KV_DEV constexpr u32 kv_prefill_matrices(u32 dim) { return dim <= 128 ? 2 : 1; }

// Rows of T, as they are stored.
template <class T, u32 D> struct KvPrefillPlain {
  typedef KvPrefillUnit<T, D, kv_prefill_matrices(D), 2> Unit;
  static constexpr u32 M = Unit::M, TOKENS = Unit::TOKENS, CHUNKS = Unit::CHUNKS;
  // Scores need no factors of their own, nor do weights.
  static constexpr bool HAS_FACTORS = false;
  // Where the rows of a token lie; 0 for one that no row of the unit sees.
  struct alignas(16) At { u64 k, v; };
  static constexpr u32 BYTES = 2 * TOKENS * sizeof(At);

  const Unit& u;
  At* tokens;  // [2][TOKENS]
  u32 block;   // of the token that this thread has looked up

  KV_DEV KvPrefillPlain(const Unit& unit, u8* memory) : u(unit), tokens((At*)memory) {}

  // Looks up one token of a tile a thread: its block, which takes a while to come, then its rows.
  KV_DEV bool looks_up(u32 tile) const {
    return tile != KV_NONE && u.thread < TOKENS && u.reaches(tile * TOKENS + u.thread);
  }
  KV_DEV void look_up(u32 tile) {
    if (!looks_up(tile)) return;
    const u32 index = (tile * TOKENS + u.thread) / u.p.k_plane.block_size;
    block = ((const u32*)u.p.plan.tables)[(u64)u.sequence().table + index];
  }
  KV_DEV void note(u32 tile, u32 buffer) const {
    const KvAttendParams& p = u.p;
    if (u.thread >= TOKENS) return;
    At at = {0, 0};
    if (looks_up(tile)) {
      const KvPlace place = {0, (tile * TOKENS + u.thread) % p.k_plane.block_size, false};
      at.k = (u64)kv_block(p.k_plane, block) + kv_row_begin(p.k_plane, place, u.kv_head);
      at.v = (u64)kv_block(p.v_plane, block) + kv_row_begin(p.v_plane, place, u.kv_head);
    }
    tokens[buffer * TOKENS + u.thread] = at;
  }

  // What a thread copies: of every STEP-th row from its own on, each chunk that changes places with its own.
  static constexpr u32 STEP = KV_PREFILL_THREADS / Unit::TURNS;
  KV_DEV u32 row() const { return u.thread / Unit::TURNS; }
  KV_DEV u32 chunk() const { return u.thread % Unit::TURNS; }
  // Whether a value of V that this thread copied is not finite.
  KV_DEV bool finds_broken(u32 buffer) const {
    bool found = false;
    for (u32 i = row(); i < TOKENS; i += STEP)
      for (u32 c = chunk(); c < CHUNKS; c += Unit::TURNS) found = found || u.is_broken(buffer, i, c);
    return found;
  }
  // Starts to copy the rows of a tile; zeros for a token that nobody sees, whose memory is not read.
  KV_DEV void copy(u32 tile, u32 buffer) const {
    if (u.reaches_all(tile * TOKENS, (tile + 1) * TOKENS)) copy_rows<true>(buffer);
    else copy_rows<false>(buffer);
    kv_cp_commit();
  }
  template <bool ALL> KV_DEV void copy_rows(u32 buffer) const {
    const u32 to = buffer * Unit::TILE_BYTES + Unit::at(row(), chunk());
    const At* from = tokens + buffer * TOKENS + row();
    const u32 k = u.shared + Unit::K + to, v = u.shared + Unit::V + to;
#pragma unroll
    for (u32 i = 0; i < TOKENS; i += STEP) {
      const At at = from[i];
      const u8 *k_row = (const u8*)at.k + chunk() * 16, *v_row = (const u8*)at.v + chunk() * 16;
#pragma unroll
      for (u32 c = 0; c < CHUNKS; c += Unit::TURNS) {
        const u32 there = i * Unit::ROW_BYTES + c * 16;
        if (ALL) {
          kv_cp_async16_at(k + there, k_row + c * 16);
          kv_cp_async16_at(v + there, v_row + c * 16);
        } else {
          kv_cp_async16(u.k + to + there, k_row + c * 16, at.k != 0);
          kv_cp_async16(u.v + to + there, v_row + c * 16, at.k != 0);
        }
      }
    }
  }

  // Before the first tile, which is brought then.
  KV_DEV void begin(u32 tile) {
    u.copy_queries();
    look_up(tile);
    note(tile, 0);
    const u32 after = u.after(tile);
    look_up(after);
    kv_sync();
    if (tile != KV_NONE) copy(tile, 0);
    note(after, 1);
  }
  // Returns when a tile's K and V are there, to all threads. Nobody uses the tile before any more.
  KV_DEV void have(u32 tile, u32 after, u32 buffer, bool whole) {
    kv_cp_wait<0>();
    if (!whole && finds_broken(buffer)) kv_atomic_max(u.notes.broken + buffer, tile + 1);
    kv_sync();
    if (after == KV_NONE) return;
    copy(after, buffer ^ 1);
    look_up(u.after(after));
  }
  // Later, before the tile after.
  KV_DEV void follow(u32 after, u32 buffer) const { note(u.after(after), buffer); }
  KV_DEV void end() { kv_cp_wait<0>(); }

  KV_DEV u32 output(float low, float high) const { return kv_pack(T(), low, high); }
  KV_DEV bool turns() const { return false; }
  KV_DEV void turn(float*) const {}
};

template <class T, u32 D, class Source> struct KvPrefill {
  typedef typename Source::Unit Unit;
  static constexpr u32 M = Unit::M, TOKENS = Unit::TOKENS, TILES = Unit::TILES, COLUMNS = Unit::COLUMNS;
  typedef float Scores[M][TILES][4];
  typedef float Sums[M][COLUMNS][4];

  const Unit& u;
  Source source;
  Sums o;
  // Of the lane's rows: the exponent of the largest score, at first of the least number, so that differences are
  // numbers; the sum of this lane's weights relative to it.
  float most[M][2], total[M][2];
  // A score times this is an exponent of 2.
  float unit;

  KV_DEV KvPrefill(const Unit& unit, u8* memory) : u(unit), source(unit, memory) {}

  KV_DEV void run() {
#pragma unroll
    for (u32 m = 0; m < M; m++) {
#pragma unroll
      for (u32 d = 0; d < COLUMNS; d++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) o[m][d][j] = 0.f;
#pragma unroll
      for (u32 h = 0; h < 2; h++) most[m][h] = kv_as_f(0xff7fffffu), total[m][h] = 0.f;
    }
    unit = folds() ? u.p.scale * KV_LOG2E : 1.f;
    u32 tile = kv_next_tile<TOKENS>(u.reach, 0), buffer = 0;
    source.begin(tile);
    while (tile != KV_NONE) {
      const u32 start = tile * TOKENS, after = u.after(tile);
      const bool whole = u.is_whole(tile);
      source.have(tile, after, buffer, whole);
      Scores s;
      u.score(s, buffer);
      source.follow(after, buffer);
      if (!folds()) make_exponents(s, buffer);
      if (!whole) hide(s, start);
      relate(s, buffer);
      const bool sums_seen = !whole && u.notes.broken[buffer] == tile + 1;
      if (sums_seen) {
        u32 weights[M][TILES][2];
#pragma unroll
        for (u32 i = 0; i < TILES; i++) make_weights(s, weights, i, i);
        u.sum_seen(o, weights, start, buffer);
      } else {
#pragma unroll
        for (u32 i = 0; i < TILES; i += 2) {
          u32 pairs[M][2][2], a[M][4];
          make_weights(s, pairs, i, 0);
          make_weights(s, pairs, i + 1, 1);
#pragma unroll
          for (u32 m = 0; m < M; m++)
#pragma unroll
            for (u32 j = 0; j < 4; j++) a[m][j] = pairs[m][j / 2][j % 2];
          u.sum(o, a, i, buffer);
        }
      }
      tile = after;
      buffer ^= 1;
    }
    source.end();
    finish();
  }

  // Whether the largest score has the largest exponent, and needs no more than `unit`.
  KV_DEV bool folds() const { return !Source::HAS_FACTORS && u.p.soft_cap <= 0.f && u.p.scale > 0.f; }
  KV_DEV void make_exponents(Scores& s, u32 buffer) const {
    const float cap = u.p.soft_cap * KV_LOG2E, scale = cap > 0.f ? u.p.scale / u.p.soft_cap : u.p.scale * KV_LOG2E;
    if constexpr (Source::HAS_FACTORS) source.scale(s, scale, buffer);
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 i = 0; i < TILES; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
          if (!Source::HAS_FACTORS) s[m][i][j] *= scale;
          if (cap > 0.f) s[m][i][j] = cap * kv_tanh(s[m][i][j]);
        }
  }

  // Scores of tokens that a row does not see.
  KV_DEV void hide(Scores& s, u32 start) const {
    KvVisible seen[M][2];
    u.find_seen(seen);
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 i = 0; i < TILES; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++)
          if (!u.sees(seen[m][j / 2], start + i * 8 + u.lane % 4 * 2 + j % 2)) s[m][i][j] = -kv_infinity();
  }

  // Makes what was summed relative to the largest score of each row with this tile. Scores become weights where
  // they get factors as such.
  KV_DEV void relate(Scores& s, u32 buffer) {
    float factors[M][2];
    bool same = true;
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        float next = -kv_infinity();
#pragma unroll
        for (u32 i = 0; i < TILES; i++) next = kv_max(next, kv_max(s[m][i][2 * h], s[m][i][2 * h + 1]));
        next = kv_max(next, kv_shfl_xorf(next, 1));
        next = kv_max(next, kv_shfl_xorf(next, 2));
        next = kv_max(most[m][h], kv_mul_rn(next, unit));
        factors[m][h] = kv_exp2(kv_sub_rn(most[m][h], next));
        same = same && most[m][h] == next;
        most[m][h] = next;
        total[m][h] *= factors[m][h];
      }
    if constexpr (Source::HAS_FACTORS) same = source.weigh(s, most, total, factors, buffer) && same;
    if (kv_all(same)) return;
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 d = 0; d < COLUMNS; d++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) o[m][d][j] *= factors[m][j / 2];
  }

  // Weights of eight tokens, in pairs.
  template <u32 N> KV_DEV void make_weights(Scores& s, u32 (&pairs)[M][N][2], u32 i, u32 to) {
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        float &low = s[m][i][2 * h], &high = s[m][i][2 * h + 1];
        if constexpr (!Source::HAS_FACTORS) {
          low = kv_exp2(kv_fma(low, unit, -most[m][h]));
          high = kv_exp2(kv_fma(high, unit, -most[m][h]));
          total[m][h] += low + high;
        }
        pairs[m][to][h] = kv_pack(T(), low, high);
      }
  }

  KV_DEV void finish() const {
    const KvAttendParams& p = u.p;
    const u32 lane = u.lane, rows = u.rows();
    const bool turns = source.turns();
    float* turned = (float*)u.q + u.warp * Unit::WARP_ROWS * D;  // rows of the warp, where everything was
    if (turns) kv_sync();
    kv_syncwarp();
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        const u32 row = u.own_row(m, h);
        float sum = total[m][h], largest = most[m][h];
        sum += kv_shfl_xorf(sum, 1);
        sum += kv_shfl_xorf(sum, 2);
        const bool empty = sum == 0.f;
        float own = 1.f;  // what values relative to the row's maximum are multiplied with
        if (p.sink_logits != 0 && row < rows) {
          const float sink = ((const float*)p.sink_logits)[u.head_of(row)] * KV_LOG2E;
          largest = kv_max(most[m][h], sink);
          own = kv_exp2(most[m][h] - largest);
          sum = sum * own + kv_exp2(sink - largest);
        }
        float factor = own / sum;
        if constexpr (Source::HAS_FACTORS) factor *= source.factor(m, h);
#pragma unroll
        for (u32 d = 0; d < COLUMNS; d++) {
          const float low = empty ? 0.f : o[m][d][2 * h] * factor, high = empty ? 0.f : o[m][d][2 * h + 1] * factor;
          if (turns) {
            float* to = turned + (row - u.warp * Unit::WARP_ROWS) * D + d * 8 + lane % 4 * 2;
            to[0] = low, to[1] = high;
          } else {
            *(u32*)(u.q + Unit::at(row, d) + lane % 4 * 4) = source.output(low, high);
          }
        }
        if (p.lse.data != 0 && row < rows && lane % 4 == 0)
          *(float*)u.row_of(p.lse, row) = sum == 0.f ? -kv_infinity() : largest * KV_LN2 + kv_log(sum);
      }
    kv_syncwarp();
    if (!turns) return u.store_rows();
#pragma unroll 1
    for (u32 i = 0; i < Unit::WARP_ROWS && u.warp * Unit::WARP_ROWS + i < rows; i++) {
      float* values = turned + i * D;
      source.turn(values);
      u32* out = (u32*)u.row_of(p.out, u.warp * Unit::WARP_ROWS + i);
      for (u32 d = lane; d < D / 2; d += 32) out[d] = source.output(values[2 * d], values[2 * d + 1]);
    }
  }
};

template <class T, u32 D, class Source> KV_DEV void kv_prefill_by(const KvAttendParams& p) {
  KV_DYN_SMEM(memory);
  typedef typename Source::Unit Unit;
  Unit unit(p, memory);
  if (!unit.find()) return;
  KvPrefill<T, D, Source> prefill(unit, memory + Unit::BYTES);
  prefill.run();
}

template <class T, u32 D> KV_DEV void kv_prefill(const KvAttendParams& p) {
  kv_prefill_by<T, D, KvPrefillPlain<T, D>>(p);
}
