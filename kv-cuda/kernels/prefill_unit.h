// A unit of prefill, whichever way rows of K and V come to shared memory: 64 rows of one kv head, where
// they lie, who sees what, and the two products. Part of prefill.h.
#pragma once
#include "visible.h"

constexpr u32 KV_PREFILL_ROWS = 64, KV_PREFILL_THREADS = 128;
constexpr float KV_LOG2E = 1.4426950408889634f, KV_LN2 = 0.6931471805599453f;

KV_DEV u32 kv_exponent_bits(KvF16) { return 0x7c00u; }
KV_DEV u32 kv_exponent_bits(KvBf16) { return 0x7f80u; }
KV_DEV float kv_to_float(KvF16, u16 x) { return kv_f16_f(x); }
KV_DEV float kv_to_float(KvBf16, u16 x) { return kv_bf16_f(x); }

template <class T, u32 D> struct KvPrefillUnit {
  static constexpr u32 DIM = D;
  static constexpr u32 TOKENS = D <= 128 ? 64 : 32;
  // An odd number of 16 bytes from row to row: eight rows of a matrix lie in different banks.
  static constexpr u32 STRIDE = D + 8;
  static constexpr u32 CHUNKS = D / 8;
  static constexpr u32 TILES = TOKENS / 8, COLUMNS = D / 8;

  const KvAttendParams& p;
  KvSequence sequence;
  u32 entry, kv_head, first, rows;
  KvReach reach;
  KvVisible lowest, highest;  // of the first and the last row
  u32* broken;                // [2]: a value of V is not finite
  u16 *q, *k, *v;             // [64 or TOKENS][STRIDE]
  u32 thread, lane, warp;

  KV_DEV KvPrefillUnit(const KvAttendParams& params, u8* memory) : p(params) {
    broken = (u32*)memory;
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

  // Whether any row of the unit may see a position.
  KV_DEV bool reaches(u32 position) const {
    return (position >= reach.begin && position < reach.end) || position < reach.sinks_end;
  }
  KV_DEV static bool sees(const KvVisible& seen, u32 position) {
    return (position >= seen.begin && position < seen.end) || position < seen.sinks;
  }

  KV_DEV void copy_queries() const {
    for (u32 i = thread; i < KV_PREFILL_ROWS * CHUNKS; i += KV_PREFILL_THREADS) {
      const u32 row = i / CHUNKS, chunk = i % CHUNKS;
      const u8* from = row_of(p.q, row < rows ? row : 0) + chunk * 16;
      kv_cp_async16(q + row * STRIDE + chunk * 8, from, row < rows);
    }
  }

  // Whether a value of V that this thread brought is not finite.
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
      kv_ldsm4(a, queries, d * 2);
#pragma unroll
      for (u32 i = 0; i < TILES; i += 2) {
        kv_ldsm4(b, keys, (i * 8 * STRIDE + d) * 2);
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
        kv_ldsm4t(b, values, (i * STRIDE + d) * 16);
        kv_mma(T(), o[d], a, b[0], b[1]);
        kv_mma(T(), o[d + 1], a, b[2], b[3]);
      }
    }
  }

  // The same value by value, so that a token meets only rows that see it: zero times a value that is
  // not finite is NaN.
  KV_DEV void sum_seen(float (&o)[COLUMNS][4], const u32 (&weights)[TILES][2], const KvVisible (&seen)[2],
                       u32 start) const {
#pragma unroll 1
    for (u32 nth = 0; nth < 8; nth++)
#pragma unroll
      for (u32 i = 0; i < TILES; i++) sum_token(o, weights[i], seen, start, i * 8 + nth);
  }
  KV_DEV void sum_token(float (&o)[COLUMNS][4], const u32 (&weights)[2], const KvVisible (&seen)[2], u32 start,
                        u32 token) const {
    const u16* row = v + token * STRIDE + lane % 4 * 2;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      // Of the four lanes of a row, one has the weight.
      const u32 pair = kv_shfl(weights[h], lane / 4 * 4 + token % 8 / 2);
      if (!sees(seen[h], start + token)) continue;
      const float weight = kv_to_float(T(), (u16)(pair >> token % 2 * 16));
#pragma unroll
      for (u32 d = 0; d < COLUMNS; d++) {
        o[d][2 * h] += weight * kv_to_float(T(), row[d * 8]);
        o[d][2 * h + 1] += weight * kv_to_float(T(), row[d * 8 + 1]);
      }
    }
  }
};
