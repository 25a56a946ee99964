// Attention of many queries over cached rows by tensor cores. Dao, "FlashAttention-2" (2023), over pages.
//
// A unit is 64 rows of one kv head: a row is one head of one query, rows of a sequence are numbered
// query by query, so that heads of a group share what is read. Each of four warps has 16 of them; all
// share tiles of K and V, which a source brings to shared memory as T = f16 or bf16: here KvPrefillPlain,
// for rows that are stored as the queries' own type, by asynchronous copies, V while scores are made, the
// next K while values are summed. prefill_coded.h has the source for codes. Contexts are not cut.
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
//   grid x: floor(total_q * group / 64) + sequences; y: kv heads; z: 1
//   threads: 128
//   shared bytes: 2 (64 + 2 N) (D + 8) + 32 N + 16, N = 64 tokens up to D = 128, 32 above
// part_rows, part_stats, part_index and counters are not used. Rows that no query owns are not touched.
#pragma once
#include "prefill_unit.h"

// Rows of T, as they are stored.
template <class T, u32 D> struct KvPrefillPlain {
  typedef KvPrefillUnit<T, D> Unit;
  static constexpr u32 TOKENS = Unit::TOKENS, STRIDE = Unit::STRIDE, CHUNKS = Unit::CHUNKS;
  // Where the rows of a token lie; 0 for one that no row of the unit sees.
  struct At { u64 k, v; };
  static constexpr u32 BYTES = 2 * TOKENS * sizeof(At);

  const Unit& u;
  At* tokens;  // [2][TOKENS]

  KV_DEV KvPrefillPlain(const Unit& unit, u8* memory) : u(unit), tokens((At*)memory) {}

  // Looks up one token of a tile a thread.
  KV_DEV void look_up(u32 tile, u32 buffer) const {
    if (tile == KV_NONE || u.thread >= TOKENS) return;
    const KvAttendParams& p = u.p;
    const u32 position = tile * TOKENS + u.thread;
    At at = {0, 0};
    if (u.reaches(position)) {
      const KvPlace place = {position / p.k_plane.block_size, position % p.k_plane.block_size, false};
      const u32 block = ((const u32*)p.plan.tables)[(u64)u.sequence.table + place.index];
      at.k = (u64)kv_block(p.k_plane, block) + kv_row_begin(p.k_plane, place, u.kv_head);
      at.v = (u64)kv_block(p.v_plane, block) + kv_row_begin(p.v_plane, place, u.kv_head);
    }
    tokens[buffer * TOKENS + u.thread] = at;
  }

  // Starts to copy the rows of a tile; zeros for a token that nobody sees, whose memory is not read.
  template <bool IS_K> KV_DEV void copy(u32 buffer) const {
    u16* to = IS_K ? u.k : u.v;
#pragma unroll 4
    for (u32 i = u.thread; i < TOKENS * CHUNKS; i += KV_PREFILL_THREADS) {
      const u32 token = i / CHUNKS, chunk = i % CHUNKS;
      const At& at = tokens[buffer * TOKENS + token];
      const u64 row = IS_K ? at.k : at.v;
      const u8* from = (const u8*)(row != 0 ? row : u.p.k_plane.base) + chunk * 16;
      kv_cp_async16(to + token * STRIDE + chunk * 8, from, row != 0);
    }
    kv_cp_commit();
  }

  // Before the first tile, whose tokens are looked up behind it.
  KV_DEV void begin() { u.copy_queries(); }
  // Behind a barrier. A tile's K and V are there when `have_k` and `have_v` return, to all threads.
  KV_DEV void start(u32 tile) { if (tile != KV_NONE) copy<true>(0); }
  KV_DEV void have_k(u32, u32 buffer, bool) {
    kv_cp_wait<0>();
    kv_sync();
    copy<false>(buffer);
    if (u.thread == 0) u.broken[buffer ^ 1] = 0;
  }
  KV_DEV void have_v(u32 buffer, bool whole) {
    kv_cp_wait<0>();
    if (!whole && u.finds_broken()) kv_atomic_max(u.broken + buffer, 1);
    kv_sync();
  }
  // K of this tile is not used any more.
  KV_DEV void follow(u32 tile, u32 buffer) { if (tile != KV_NONE) copy<true>(buffer); }
  KV_DEV void end() { kv_cp_wait<0>(); }

  // Scores, as they are capped; weights, as they meet values.
  KV_DEV void scale(float (&s)[Unit::TILES][4], float factor, u32) const {
#pragma unroll
    for (u32 i = 0; i < Unit::TILES; i++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) s[i][j] *= factor;
  }
  KV_DEV void weigh(float (&)[Unit::TILES][4], float (&)[2], u32) {}
  // What sums of weighed values are multiplied with.
  KV_DEV float factor(u32) const { return 1.f; }
  KV_DEV u32 output(float low, float high) const { return kv_pack(T(), low, high); }
  KV_DEV bool turns() const { return false; }
  KV_DEV void turn(float*) const {}
};

template <class T, u32 D, class Source> struct KvPrefill {
  typedef KvPrefillUnit<T, D> Unit;
  static constexpr u32 TOKENS = Unit::TOKENS, TILES = Unit::TILES, COLUMNS = Unit::COLUMNS;

  const Unit& u;
  Source source;

  KV_DEV KvPrefill(const Unit& unit, u8* memory) : u(unit), source(unit, memory) {}

  KV_DEV void run() {
    const KvAttendParams& p = u.p;
    const u32 lane = u.lane;
    if (u.thread < 2) u.broken[u.thread] = 0;
    source.begin();
    float o[COLUMNS][4], max[2], total[2];
    KvVisible seen[2];
#pragma unroll
    for (u32 d = 0; d < COLUMNS; d++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) o[d][j] = 0.f;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const u32 row = u.warp * 16 + lane / 4 + h * 8;
      max[h] = -kv_infinity();
      total[h] = 0.f;
      seen[h] = {0, 0, 0};
      if (row < u.rows) seen[h] = kv_visible(p, u.sequence, u.query_of(row));
    }
    // Scores are made exponents of 2.
    const bool capped = p.soft_cap > 0.f;
    const float scale = capped ? p.scale / p.soft_cap : p.scale * KV_LOG2E, cap = p.soft_cap * KV_LOG2E;
    u32 tile = kv_next_tile<TOKENS>(u.reach, 0), buffer = 0;
    source.look_up(tile, 0);
    kv_sync();
    source.start(tile);
    while (tile != KV_NONE) {
      const u32 start = tile * TOKENS, after = kv_next_tile<TOKENS>(u.reach, tile + 1);
      const bool whole =
          (start >= u.highest.begin && start + TOKENS <= u.lowest.end) || start + TOKENS <= u.lowest.sinks;
      source.have_k(tile, buffer, whole);
      source.look_up(after, buffer ^ 1);
      float s[TILES][4], factors[2];
      u.score(s);
      source.scale(s, scale, buffer);
      if (capped) {
#pragma unroll
        for (u32 i = 0; i < TILES; i++)
#pragma unroll
          for (u32 j = 0; j < 4; j++) s[i][j] = cap * kv_tanh(s[i][j]);
      }
      if (!whole) {
#pragma unroll
        for (u32 i = 0; i < TILES; i++)
#pragma unroll
          for (u32 j = 0; j < 4; j++)
            if (!u.sees(seen[j / 2], start + i * 8 + lane % 4 * 2 + j % 2)) s[i][j] = -kv_infinity();
      }
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        float next = max[h];
#pragma unroll
        for (u32 i = 0; i < TILES; i++) next = kv_max(next, kv_max(s[i][2 * h], s[i][2 * h + 1]));
        next = kv_max(next, kv_shfl_xorf(next, 1));
        next = kv_max(next, kv_shfl_xorf(next, 2));
        // Relative to 0 as long as every score is minus infinity: the difference of two is NaN.
        const float base = next == -kv_infinity() ? 0.f : next;
        factors[h] = kv_exp2(max[h] - base);
        max[h] = next;
        float added = 0.f;
#pragma unroll
        for (u32 i = 0; i < TILES; i++) {
          s[i][2 * h] = kv_exp2(s[i][2 * h] - base);
          s[i][2 * h + 1] = kv_exp2(s[i][2 * h + 1] - base);
          added += s[i][2 * h] + s[i][2 * h + 1];
        }
        total[h] = total[h] * factors[h] + added;
      }
      source.weigh(s, factors, buffer);
      u32 weights[TILES][2];
#pragma unroll
      for (u32 i = 0; i < TILES; i++)
#pragma unroll
        for (u32 h = 0; h < 2; h++) weights[i][h] = kv_pack(T(), s[i][2 * h], s[i][2 * h + 1]);
#pragma unroll
      for (u32 d = 0; d < COLUMNS; d++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) o[d][j] *= factors[j / 2];
      source.have_v(buffer, whole);
      source.follow(after, buffer ^ 1);
      if (!whole && u.broken[buffer] != 0) u.sum_seen(o, weights, seen, start);
      else u.sum(o, weights);
      tile = after;
      buffer ^= 1;
    }
    source.end();
    finish(o, max, total);
  }

  KV_DEV void finish(float (&o)[COLUMNS][4], const float (&max)[2], const float (&total)[2]) const {
    const KvAttendParams& p = u.p;
    const u32 lane = u.lane;
    const bool turns = source.turns();
    float* turned = (float*)u.q + u.warp * 16 * D;  // rows of the warp, where everything was
    if (turns) kv_sync();
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const u32 row = u.warp * 16 + lane / 4 + h * 8;
      float sum = total[h], most = max[h];
      sum += kv_shfl_xorf(sum, 1);
      sum += kv_shfl_xorf(sum, 2);
      const bool empty = sum == 0.f;
      float own = 1.f;  // what values relative to the row's maximum are multiplied with
      if (p.sink_logits != 0 && row < u.rows) {
        const float sink = ((const float*)p.sink_logits)[u.head_of(row)] * KV_LOG2E;
        most = kv_max(max[h], sink);
        if (most != -kv_infinity()) {
          own = kv_exp2(max[h] - most);
          sum = sum * own + kv_exp2(sink - most);
        }
      }
      const float factor = own / sum * source.factor(h);
      if (turns) {
        float* to = turned + (lane / 4 + h * 8) * D + lane % 4 * 2;
#pragma unroll
        for (u32 d = 0; d < COLUMNS; d++) {
          to[d * 8] = empty ? 0.f : o[d][2 * h] * factor;
          to[d * 8 + 1] = empty ? 0.f : o[d][2 * h + 1] * factor;
        }
      }
      if (row >= u.rows) continue;
      if (!turns) {
        u32* out = (u32*)u.row_of(p.out, row) + lane % 4;
#pragma unroll
        for (u32 d = 0; d < COLUMNS; d++)
          out[d * 4] = empty ? 0u : source.output(o[d][2 * h] * factor, o[d][2 * h + 1] * factor);
      }
      if (p.lse.data != 0 && lane % 4 == 0)
        *(float*)u.row_of(p.lse, row) = sum == 0.f ? -kv_infinity() : most * KV_LN2 + kv_log(sum);
    }
    if (!turns) return;
    kv_syncwarp();
#pragma unroll 1
    for (u32 i = 0; i < 16 && u.warp * 16 + i < u.rows; i++) {
      float* values = turned + i * D;
      source.turn(values);
      u32* out = (u32*)u.row_of(p.out, u.warp * 16 + i);
      for (u32 d = lane; d < D / 2; d += 32) out[d] = source.output(values[2 * d], values[2 * d + 1]);
    }
  }
};

template <class T, u32 D, class Source> KV_DEV void kv_prefill_by(const KvAttendParams& p) {
  KV_DYN_SMEM(memory);
  KvPrefillUnit<T, D> unit(p, memory + Source::BYTES);
  if (!unit.find()) return;
  KvPrefill<T, D, Source> prefill(unit, memory);
  prefill.run();
}

template <class T, u32 D> KV_DEV void kv_prefill(const KvAttendParams& p) {
  kv_prefill_by<T, D, KvPrefillPlain<T, D>>(p);
}
