// A unit of prefill, whichever way rows of K and V come to shared memory: 64 or 128 rows of one kv head, where
// they lie, who sees what, and the two products. Part of prefill.h.
#pragma once
#include "visible.h"

constexpr u32 KV_PREFILL_THREADS = 128;
constexpr float KV_LOG2E = 1.4426950408889634f, KV_LN2 = 0.6931471805599453f;

KV_DEV u32 kv_exponent_bits(KvF16) { return 0x7c00u; }
KV_DEV u32 kv_exponent_bits(KvBf16) { return 0x7f80u; }
KV_DEV float kv_to_float(KvF16, u16 x) { return kv_f16_f(x); }
KV_DEV float kv_to_float(KvBf16, u16 x) { return kv_bf16_f(x); }

// Rows of `chunks` chunks of eight values, which lie on 16 bytes, follow each other in shared memory without a gap.
// So chunks of a row change places: chunk `i` lies where `i ^ turn` would, the turn being the row's number in steps
// of 8 / kv_chunk_turns. Chunks of the same number of eight rows then lie in different banks.
KV_DEV constexpr u32 kv_chunk_turns(u32 chunks) { return chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : 2; }
KV_DEV u32 kv_chunk_at(u32 row, u32 chunk, u32 chunks) {
  const u32 turns = kv_chunk_turns(chunks);
  return (row * chunks + (chunk ^ (row * turns / 8 % turns))) * 16;
}

// Of a unit, what registers have no room for: it lies in shared memory.
struct KvPrefillNotes {
  u32 broken[2];          // the number behind the last tile of a buffer in which a value of V is not finite
  u32 begin, end, sinks;  // what every row sees
  u32 entry, first;       // of the batch; of the entry's rows
  u32 pad;
};

// MATRICES of 16 rows a warp: whatever a warp loads of K and V, it multiplies with all of them. BUFFERS tiles of
// K and V lie in shared memory.
template <class T, u32 D, u32 MATRICES, u32 BUFFERS> struct KvPrefillUnit {
  static constexpr u32 M = MATRICES;
  static constexpr u32 WARP_ROWS = 16 * M, ROWS = 4 * WARP_ROWS;
  static constexpr u32 TOKENS = D <= 128 ? 64 : 32;
  static constexpr u32 CHUNKS = D / 8;  // of a row
  static constexpr u32 TILES = TOKENS / 8, COLUMNS = D / 8;
  static constexpr u32 ROW_BYTES = 2 * D, TURNS = kv_chunk_turns(CHUNKS);
  static constexpr u32 TILE_BYTES = TOKENS * ROW_BYTES;
  // Where rows of K and V and the notes lie, from the first row of queries.
  static constexpr u32 K = ROWS * ROW_BYTES, V = K + BUFFERS * TILE_BYTES, NOTES = V + BUFFERS * TILE_BYTES;
  static constexpr u32 BYTES = NOTES + sizeof(KvPrefillNotes);

  const KvAttendParams& p;
  u32 kv_head, thread, lane, warp;
  KvReach reach;
  u8 *q, *k, *v;  // [ROWS], [BUFFERS][TOKENS] rows
  u32 shared;     // q, as an address of shared memory
  KvPrefillNotes& notes;

  KV_DEV KvPrefillUnit(const KvAttendParams& params, u8* memory)
      : p(params), notes(*(KvPrefillNotes*)(memory + NOTES)) {
    q = memory;
    k = memory + K;
    v = memory + V;
    shared = kv_smem_addr(memory);
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
    auto start = [=](u32 i) { return (u32)((u64)sequences[i].q_start * group / ROWS) + i; };
    const u32 entry = kv_entry_of(counts.sequences, blockIdx.x, start);
    const KvSequence sequence = sequences[entry];
    if (sequence.q_len < p.q_len_min || sequence.q_len > p.q_len_max) return false;
    const u32 all = sequence.q_len * p.group, units = (all + ROWS - 1) / ROWS;
    const u32 nth = blockIdx.x - start(entry);
    if (nth >= units) return false;
    // Late queries see most keys, so they come first.
    const u32 first = (units - 1 - nth) * ROWS, left = all - first;
    kv_head = blockIdx.y;
    const KvVisible lowest = kv_visible(p, sequence, first / p.group);
    const KvVisible highest = kv_visible(p, sequence, (first + (left < ROWS ? left : ROWS) - 1) / p.group);
    reach = kv_reach(lowest, highest, 0, sequence.kv_len);
    if (thread == 0) notes = {{0, 0}, highest.begin, lowest.end, lowest.sinks, entry, first, 0};
    kv_sync();
    return true;
  }

  // From memory each time, so that it takes no registers in between.
  KV_DEV const KvSequence& sequence() const { return ((const KvSequence*)p.plan.sequences)[notes.entry]; }
  KV_DEV u32 rows() const {
    const u32 left = sequence().q_len * p.group - notes.first;
    return left < ROWS ? left : ROWS;
  }
  KV_DEV u32 query_of(u32 row) const { return (notes.first + row) / p.group; }
  KV_DEV u32 head_of(u32 row) const { return kv_head * p.group + (notes.first + row) % p.group; }
  KV_DEV u8* row_of(const KvTensor& t, u32 row) const {
    return kv_head_row(t, notes.entry, sequence().q_start, query_of(row), head_of(row));
  }
  // The row of this lane's values `2 * half` and `2 * half + 1` of matrix `m`.
  KV_DEV u32 own_row(u32 m, u32 half) const { return warp * WARP_ROWS + m * 16 + half * 8 + lane / 4; }

  // The next tile in which something is seen.
  KV_DEV u32 after(u32 tile) const { return tile == KV_NONE ? tile : kv_next_tile<TOKENS>(reach, tile + 1); }
  // Whether any row of the unit may see a position.
  KV_DEV bool reaches(u32 position) const {
    return (position >= reach.begin && position < reach.end) || position < reach.sinks_end;
  }
  KV_DEV bool reaches_all(u32 begin, u32 end) const {
    return (begin >= reach.begin && end <= reach.end) || end <= reach.sinks_end;
  }
  // Whether every row sees every token of a tile.
  KV_DEV bool is_whole(u32 tile) const {
    const u32 start = tile * TOKENS, after = start + TOKENS;
    return (start >= notes.begin && after <= notes.end) || after <= notes.sinks;
  }
  KV_DEV static bool sees(const KvVisible& seen, u32 position) {
    return (position >= seen.begin && position < seen.end) || position < seen.sinks;
  }
  KV_DEV void find_seen(KvVisible (&seen)[M][2]) const {
    const KvSequence& s = sequence();
    const u32 row = notes.first + own_row(0, 0), end = notes.first + rows();
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        const u32 own = row + (m * 16 + h * 8);
        seen[m][h] = {0, 0, 0};
        if (own < end) seen[m][h] = kv_visible(p, s, own / p.group);
      }
  }

  KV_DEV static u32 at(u32 row, u32 chunk) { return kv_chunk_at(row, chunk, CHUNKS); }
  KV_DEV static u32 tile_at(u32 buffer) { return BUFFERS == 1 ? 0 : buffer * TILE_BYTES; }
  // A lane that has the address of one of a row's first two chunks has that of one of the two from `chunk` on by
  // turning it and by adding the rest, which becomes part of an instruction.
  KV_DEV static u32 turned(u32 at, u32 chunk) { return at ^ chunk % TURNS * 16; }
  KV_DEV static constexpr u32 added(u32 chunk) { return (chunk - chunk % TURNS) * 16; }

  // The chunks of the warp's rows in a tensor, and where each lies in shared memory: `each(to, address, there)`.
  template <class Each> KV_DEV void for_rows(const KvTensor& t, Each each) const {
    const u32 begin = warp * WARP_ROWS, nth = begin + lane % WARP_ROWS, end = rows();
    const u64 mine = (u64)row_of(t, nth < end ? nth : 0);
#pragma unroll 4
    for (u32 i = lane; i < WARP_ROWS * CHUNKS; i += 32) {
      const u32 row = i / CHUNKS, chunk = i % CHUNKS;
      const u64 low = kv_shfl((u32)mine, row), high = kv_shfl((u32)(mine >> 32), row);
      each(q + at(begin + row, chunk), (u8*)(high << 32 | low) + chunk * 16, begin + row < end);
    }
  }
  KV_DEV void copy_queries() const {
    for_rows(p.q, [](u8* to, const u8* from, bool there) { kv_cp_async16(to, from, there); });
  }
  // What the warp has made of its rows of queries.
  KV_DEV void store_rows() const {
    for_rows(p.out, [](const u8* from, u8* to, bool there) { if (there) *(KvWord4*)to = *(const KvWord4*)from; });
  }

  // Whether one of eight values of V is not finite.
  KV_DEV bool is_broken(u32 buffer, u32 token, u32 chunk) const {
    const u32 low = kv_exponent_bits(T()), high = low << 16;
    const u32* pairs = (const u32*)(v + tile_at(buffer) + at(token, chunk));
    bool found = false;
#pragma unroll
    for (u32 i = 0; i < 4; i++) found = found || (pairs[i] & low) == low || (pairs[i] & high) == high;
    return found;
  }

  KV_DEV void score(float (&s)[M][TILES][4], u32 buffer) const {
    const u32 queries = shared + at(warp * WARP_ROWS + lane % 16, lane / 16);
    const u32 keys = shared + K + tile_at(buffer) + at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 i = 0; i < TILES; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) s[m][i][j] = 0.f;
#pragma unroll
    for (u32 c = 0; c < CHUNKS; c += 2) {
      u32 a[M][4], b[4];
#pragma unroll
      for (u32 m = 0; m < M; m++) kv_ldsm4_at(a[m], turned(queries, c) + (m * 16 * ROW_BYTES + added(c)));
#pragma unroll
      for (u32 i = 0; i < TILES; i += 2) {
        kv_ldsm4_at(b, turned(keys, c) + (i * 8 * ROW_BYTES + added(c)));
#pragma unroll
        for (u32 m = 0; m < M; m++) {
          kv_mma(T(), s[m][i], a[m], b[0], b[1]);
          kv_mma(T(), s[m][i + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // Adds values of 16 tokens, which are two of the TILES from `i` on.
  KV_DEV void sum(float (&o)[M][COLUMNS][4], const u32 (&a)[M][4], u32 i, u32 buffer) const {
    const u32 values = shared + V + tile_at(buffer) + at(lane % 16, lane / 16);
#pragma unroll
    for (u32 c = 0; c < CHUNKS; c += 2) {
      u32 b[4];
      kv_ldsm4t_at(b, turned(values, c) + (i * 8 * ROW_BYTES + added(c)));
#pragma unroll
      for (u32 m = 0; m < M; m++) {
        kv_mma(T(), o[m][c], a[m], b[0], b[1]);
        kv_mma(T(), o[m][c + 1], a[m], b[2], b[3]);
      }
    }
  }

  // The same for all tokens, value by value, so that a token meets only rows that see it: zero times a value that
  // is not finite is NaN.
  KV_DEV void sum_seen(float (&o)[M][COLUMNS][4], const u32 (&weights)[M][TILES][2], u32 start, u32 buffer) const {
    KvVisible seen[M][2];
    find_seen(seen);
#pragma unroll 1
    for (u32 token = 0; token < TOKENS; token++) {
      float weight[M][2];
      bool meets[M][2];
#pragma unroll
      for (u32 m = 0; m < M; m++)
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
          u32 pair = 0;
#pragma unroll
          for (u32 i = 0; i < TILES; i++) pair = token / 8 == i ? weights[m][i][h] : pair;
          // Of the four lanes of a row, one has the weight.
          pair = kv_shfl(pair, lane / 4 * 4 + token % 8 / 2);
          weight[m][h] = kv_to_float(T(), (u16)(pair >> token % 2 * 16));
          meets[m][h] = sees(seen[m][h], start + token);
        }
#pragma unroll
      for (u32 d = 0; d < COLUMNS; d++) {
        const u32 pair = *(const u32*)(v + tile_at(buffer) + at(token, d) + lane % 4 * 4);
        const float low = kv_to_float(T(), (u16)pair), high = kv_to_float(T(), (u16)(pair >> 16));
#pragma unroll
        for (u32 m = 0; m < M; m++)
#pragma unroll
          for (u32 h = 0; h < 2; h++) {
            if (!meets[m][h]) continue;
            o[m][d][2 * h] += weight[m][h] * low;
            o[m][d][2 * h + 1] += weight[m][h] * high;
          }
      }
    }
  }
};
