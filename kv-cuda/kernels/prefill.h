// Attention of many queries over cached rows by tensor cores, for rows that are stored as the queries'
// own 16-bit type. Dao, "FlashAttention-2" (2023), over pages.
//
// A unit is 64 rows of one kv head: a row is one head of one query, rows of a sequence are numbered
// query by query, so that heads of a group share what is read. Each of four warps has 16 of them; all
// share tiles of K and V, which come by asynchronous copies: V while scores are made, the next K while
// values are summed. Contexts are not cut.
//
// Takes a call where, for both planes and T = f16 or bf16:
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
#include "visible.h"

constexpr u32 KV_PREFILL_ROWS = 64, KV_PREFILL_THREADS = 128;
constexpr float KV_LOG2E = 1.4426950408889634f, KV_LN2 = 0.6931471805599453f;

KV_DEV u32 kv_exponent_bits(KvF16) { return 0x7c00u; }
KV_DEV u32 kv_exponent_bits(KvBf16) { return 0x7f80u; }
KV_DEV float kv_to_float(KvF16, u16 x) { return kv_f16_f(x); }
KV_DEV float kv_to_float(KvBf16, u16 x) { return kv_bf16_f(x); }

template <class T, u32 D> struct KvPrefill {
  static constexpr u32 TOKENS = D <= 128 ? 64 : 32;
  // An odd number of 16 bytes from row to row: eight rows of a matrix lie in different banks.
  static constexpr u32 STRIDE = D + 8;
  static constexpr u32 CHUNKS = D / 8;
  static constexpr u32 TILES = TOKENS / 8, COLUMNS = D / 8;

  // Where the rows of a token lie; 0 for one that no row of the unit sees.
  struct At { u64 k, v; };

  const KvAttendParams& p;
  KvSequence sequence;
  u32 entry, kv_head, first, rows;
  KvReach reach;
  KvVisible lowest, highest;  // of the first and the last row
  At* tokens;                 // [2][TOKENS]
  u32* broken;                // [2]: a value of V is not finite
  u16 *q, *k, *v;             // [64 or TOKENS][STRIDE]
  u32 thread, lane, warp;

  KV_DEV explicit KvPrefill(const KvAttendParams& params) : p(params) {
    KV_DYN_SMEM(memory);
    tokens = (At*)memory;
    broken = (u32*)(tokens + 2 * TOKENS);
    q = (u16*)(broken + 4);
    k = q + KV_PREFILL_ROWS * STRIDE;
    v = k + TOKENS * STRIDE;
    thread = threadIdx.x;
    lane = thread % 32;
    warp = thread / 32;
  }

  // Finds the unit of this block; false where there is none.
  KV_DEV bool find() {
    const KvCounts& counts = *(const KvCounts*)p.plan.counts;
    const KvSequence* sequences = (const KvSequence*)p.plan.sequences;
    if (counts.sequences == 0) return false;
    // Units of a sequence come behind a place that no earlier sequence's reach.
    const u32 group = p.group;
    auto start = [=](u32 i) { return (u32)((u64)sequences[i].q_start * group / KV_PREFILL_ROWS) + i; };
    entry = kv_entry_of(counts.sequences, blockIdx.x, start);
    sequence = sequences[entry];
    if (sequence.q_len < p.q_len_min || sequence.q_len > p.q_len_max) return false;
    const u32 all = sequence.q_len * p.group, units = (all + KV_PREFILL_ROWS - 1) / KV_PREFILL_ROWS;
    const u32 nth = blockIdx.x - start(entry);
    if (nth >= units) return false;
    // Late queries see most keys, so they come first.
    first = (units - 1 - nth) * KV_PREFILL_ROWS;
    rows = all - first < KV_PREFILL_ROWS ? all - first : KV_PREFILL_ROWS;
    kv_head = blockIdx.y;
    lowest = kv_visible(p, sequence, first / p.group);
    highest = kv_visible(p, sequence, (first + rows - 1) / p.group);
    reach = kv_reach(lowest, highest, 0, sequence.kv_len);
    return true;
  }

  KV_DEV u32 query_of(u32 row) const { return (first + row) / p.group; }
  KV_DEV u32 head_of(u32 row) const { return kv_head * p.group + (first + row) % p.group; }
  KV_DEV u8* row_of(const KvTensor& t, u32 row) const {
    return kv_head_row(t, entry, sequence.q_start, query_of(row), head_of(row));
  }

  // Looks up one token of a tile a thread.
  KV_DEV void look_up(u32 tile, u32 buffer) const {
    if (tile == KV_NONE || thread >= TOKENS) return;
    const u32 position = tile * TOKENS + thread;
    const bool seen = (position >= reach.begin && position < reach.end) || position < reach.sinks_end;
    At at = {0, 0};
    if (seen) {
      const KvPlace place = {position / p.k_plane.block_size, position % p.k_plane.block_size, false};
      const u32 block = ((const u32*)p.plan.tables)[(u64)sequence.table + place.index];
      at.k = (u64)kv_block(p.k_plane, block) + kv_row_begin(p.k_plane, place, kv_head);
      at.v = (u64)kv_block(p.v_plane, block) + kv_row_begin(p.v_plane, place, kv_head);
    }
    tokens[buffer * TOKENS + thread] = at;
  }

  // Starts to copy the rows of a tile; zeros for a token that nobody sees, whose memory is not read.
  template <bool IS_K> KV_DEV void copy(u32 buffer) const {
    u16* to = IS_K ? k : v;
#pragma unroll 4
    for (u32 i = thread; i < TOKENS * CHUNKS; i += KV_PREFILL_THREADS) {
      const u32 token = i / CHUNKS, chunk = i % CHUNKS;
      const At& at = tokens[buffer * TOKENS + token];
      const u64 row = IS_K ? at.k : at.v;
      const u8* from = (const u8*)(row != 0 ? row : p.k_plane.base) + chunk * 16;
      kv_cp_async16(to + token * STRIDE + chunk * 8, from, row != 0);
    }
    kv_cp_commit();
  }

  KV_DEV void copy_queries() const {
    for (u32 i = thread; i < KV_PREFILL_ROWS * CHUNKS; i += KV_PREFILL_THREADS) {
      const u32 row = i / CHUNKS, chunk = i % CHUNKS;
      const u8* from = row_of(p.q, row < rows ? row : 0) + chunk * 16;
      kv_cp_async16(q + row * STRIDE + chunk * 8, from, row < rows);
    }
  }

  // Whether a value that this thread copied is not finite.
  KV_DEV bool finds_broken() const {
    const u32 low = kv_exponent_bits(T()), high = low << 16;
    bool found = false;
    for (u32 i = thread; i < TOKENS * CHUNKS; i += KV_PREFILL_THREADS) {
      const u32* pairs = (const u32*)(v + i / CHUNKS * STRIDE + i % CHUNKS * 8);
      for (u32 j = 0; j < 4; j++) found = found || (pairs[j] & low) == low || (pairs[j] & high) == high;
    }
    return found;
  }

  KV_DEV void score(float (&s)[TILES][4]) const {
    const u16* queries = q + (warp * 16 + lane % 16) * STRIDE + lane / 16 * 8;
    const u16* keys = k + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (u32 i = 0; i < TILES; i++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) s[i][j] = 0.f;
#pragma unroll
    for (u32 d = 0; d < D; d += 16) {
      u32 a[4], b[4];
      kv_ldsm4(a, queries + d);
#pragma unroll
      for (u32 i = 0; i < TILES; i += 2) {
        kv_ldsm4(b, keys + i * 8 * STRIDE + d);
        kv_mma(T(), s[i], a, b[0], b[1]);
        kv_mma(T(), s[i + 1], a, b[2], b[3]);
      }
    }
  }

  KV_DEV void sum(float (&o)[COLUMNS][4], const u32 (&weights)[TILES][2]) const {
    const u16* values = v + (lane % 8 + lane / 8 % 2 * 8) * STRIDE + lane / 16 * 8;
#pragma unroll
    for (u32 i = 0; i < TILES; i += 2) {
      const u32 a[4] = {weights[i][0], weights[i][1], weights[i + 1][0], weights[i + 1][1]};
#pragma unroll
      for (u32 d = 0; d < COLUMNS; d += 2) {
        u32 b[4];
        kv_ldsm4t(b, values + i * 8 * STRIDE + d * 8);
        kv_mma(T(), o[d], a, b[0], b[1]);
        kv_mma(T(), o[d + 1], a, b[2], b[3]);
      }
    }
  }

  // The same value by value, so that a token meets only rows that see it: zero times a value that is
  // not finite is NaN. The weights go through the memory of K, which everybody has read.
  KV_DEV void sum_seen(float (&o)[COLUMNS][4], const u32 (&weights)[TILES][2], const KvVisible (&seen)[2],
                       u32 start) const {
    constexpr u32 WEIGHTS = TOKENS + 8;
    u16* own = k + warp * 16 * WEIGHTS;
#pragma unroll
    for (u32 i = 0; i < TILES; i++)
#pragma unroll
      for (u32 h = 0; h < 2; h++)
        *(u32*)(own + (lane / 4 + h * 8) * WEIGHTS + i * 8 + lane % 4 * 2) = weights[i][h];
    kv_syncwarp();
    for (u32 token = 0; token < TOKENS; token++) {
      const u16* row = v + token * STRIDE + lane % 4 * 2;
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        if (!sees(seen[h], start + token)) continue;
        const float weight = kv_to_float(T(), own[(lane / 4 + h * 8) * WEIGHTS + token]);
#pragma unroll
        for (u32 d = 0; d < COLUMNS; d++) {
          o[d][2 * h] += weight * kv_to_float(T(), row[d * 8]);
          o[d][2 * h + 1] += weight * kv_to_float(T(), row[d * 8 + 1]);
        }
      }
    }
  }

  KV_DEV static bool sees(const KvVisible& seen, u32 position) {
    return (position >= seen.begin && position < seen.end) || position < seen.sinks;
  }

  KV_DEV void run() {
    copy_queries();
    float o[COLUMNS][4], max[2], total[2];
    KvVisible seen[2];
#pragma unroll
    for (u32 d = 0; d < COLUMNS; d++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) o[d][j] = 0.f;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const u32 row = warp * 16 + lane / 4 + h * 8;
      max[h] = -kv_infinity();
      total[h] = 0.f;
      seen[h] = {0, 0, 0};
      if (row < rows) seen[h] = kv_visible(p, sequence, query_of(row));
    }
    // Scores are made exponents of 2.
    const bool capped = p.soft_cap > 0.f;
    const float scale = capped ? p.scale / p.soft_cap : p.scale * KV_LOG2E, cap = p.soft_cap * KV_LOG2E;
    u32 tile = kv_next_tile<TOKENS>(reach, 0), buffer = 0;
    look_up(tile, 0);
    if (thread < 2) broken[thread] = 0;
    kv_sync();
    if (tile != KV_NONE) copy<true>(0);
    while (tile != KV_NONE) {
      const u32 start = tile * TOKENS, after = kv_next_tile<TOKENS>(reach, tile + 1);
      const bool whole = (start >= highest.begin && start + TOKENS <= lowest.end) || start + TOKENS <= lowest.sinks;
      kv_cp_wait<0>();
      kv_sync();
      copy<false>(buffer);
      if (thread == 0) broken[buffer ^ 1] = 0;
      look_up(after, buffer ^ 1);
      float s[TILES][4], factors[2];
      score(s);
      if (capped) {
#pragma unroll
        for (u32 i = 0; i < TILES; i++)
#pragma unroll
          for (u32 j = 0; j < 4; j++) s[i][j] = cap * kv_tanh(s[i][j] * scale);
      } else {
#pragma unroll
        for (u32 i = 0; i < TILES; i++)
#pragma unroll
          for (u32 j = 0; j < 4; j++) s[i][j] *= scale;
      }
      if (!whole) {
#pragma unroll
        for (u32 i = 0; i < TILES; i++)
#pragma unroll
          for (u32 j = 0; j < 4; j++)
            if (!sees(seen[j / 2], start + i * 8 + lane % 4 * 2 + j % 2)) s[i][j] = -kv_infinity();
      }
      u32 weights[TILES][2];
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
          const float low = kv_exp2(s[i][2 * h] - base), high = kv_exp2(s[i][2 * h + 1] - base);
          added += low + high;
          weights[i][h] = kv_pack(T(), low, high);
        }
        total[h] = total[h] * factors[h] + added;
      }
#pragma unroll
      for (u32 d = 0; d < COLUMNS; d++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) o[d][j] *= factors[j / 2];
      kv_cp_wait<0>();
      if (!whole && finds_broken()) kv_atomic_max(broken + buffer, 1);
      kv_sync();
      if (!whole && broken[buffer] != 0) {
        sum_seen(o, weights, seen, start);
        kv_sync();
        if (after != KV_NONE) copy<true>(buffer ^ 1);
      } else {
        if (after != KV_NONE) copy<true>(buffer ^ 1);
        sum(o, weights);
      }
      tile = after;
      buffer ^= 1;
    }
    kv_cp_wait<0>();
    finish(o, max, total);
  }

  KV_DEV void finish(const float (&o)[COLUMNS][4], const float (&max)[2], const float (&total)[2]) const {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const u32 row = warp * 16 + lane / 4 + h * 8;
      float sum = total[h], most = max[h];
      sum += kv_shfl_xorf(sum, 1);
      sum += kv_shfl_xorf(sum, 2);
      if (row >= rows) continue;
      const bool empty = sum == 0.f;
      float own = 1.f;  // what values relative to the row's maximum are multiplied with
      if (p.sink_logits != 0) {
        const float sink = ((const float*)p.sink_logits)[head_of(row)] * KV_LOG2E;
        most = kv_max(max[h], sink);
        if (most != -kv_infinity()) {
          own = kv_exp2(max[h] - most);
          sum = sum * own + kv_exp2(sink - most);
        }
      }
      const float factor = own / sum;
      u32* out = (u32*)row_of(p.out, row) + lane % 4;
#pragma unroll
      for (u32 d = 0; d < COLUMNS; d++)
        out[d * 4] = empty ? 0u : kv_pack(T(), o[d][2 * h] * factor, o[d][2 * h + 1] * factor);
      if (p.lse.data != 0 && lane % 4 == 0)
        *(float*)row_of(p.lse, row) = sum == 0.f ? -kv_infinity() : most * KV_LN2 + kv_log(sum);
    }
  }
};

template <class T, u32 D> KV_DEV void kv_prefill(const KvAttendParams& p) {
  KvPrefill<T, D> unit(p);
  if (unit.find()) unit.run();
}
