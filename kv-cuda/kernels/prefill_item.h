// The work item of prefill, for every source of K and V tiles: 64 or 128 query rows of one kv head,
// their addresses and masks, and the two matrix products. Part of prefill.h.
#pragma once
#include "prefill_plan.h"

constexpr u32 KV_PREFILL_THREADS = 128;
constexpr float KV_LOG2E = 1.4426950408889634f, KV_LN2 = 0.6931471805599453f;

KV_DEV u32 kv_exponent_bits(KvF16) { return 0x7c00u; }
KV_DEV u32 kv_exponent_bits(KvBf16) { return 0x7f80u; }
KV_DEV float kv_to_float(KvF16, u16 x) { return kv_f16_f(x); }
KV_DEV float kv_to_float(KvBf16, u16 x) { return kv_bf16_f(x); }

// The swizzle of rows in shared memory. A row has `chunks` chunks of eight values (16 bytes), and
// rows are contiguous. Chunk `i` is stored in place `i ^ s` with s = row * period / 8 % period, so
// that the same chunk of eight rows is in different banks.
KV_DEV constexpr u32 kv_swizzle_period(u32 chunks) { return chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : 2; }
KV_DEV u32 kv_swizzled(u32 row, u32 chunk, u32 chunks) {
  const u32 period = kv_swizzle_period(chunks);
  return (row * chunks + (chunk ^ (row * period / 8 % period))) * 16;
}

// State of a work item for which registers have no room; it is in shared memory.
struct KvPrefillState {
  u32 non_finite[2];         // 1 + the last tile in a buffer that has a non-finite value of V
  u32 begin, end, sink_end;  // keys that every row sees
  u32 entry, first;          // entry of the batch; its first row in this item
  u32 place;                 // of the item in the schedule
};

// MATRICES is the number of 16-row mma tiles per warp, all of which use each loaded fragment of K
// and V; BUFFERS the number of K and V tiles in shared memory; N that of their tokens.
template <class T, u32 D, u32 MATRICES, u32 BUFFERS, u32 N = D <= 128 ? 64 : 32> struct KvPrefillItem {
  static constexpr u32 M = MATRICES, TOKENS = N;
  static constexpr u32 WARP_ROWS = 16 * M, ROWS = 4 * WARP_ROWS;
  static constexpr u32 CHUNKS = D / 8;  // of a row
  static constexpr u32 TILES = TOKENS / 8, COLUMNS = D / 8;
  static constexpr u32 ROW_BYTES = 2 * D, PERIOD = kv_swizzle_period(CHUNKS);
  static constexpr u32 TILE_BYTES = TOKENS * ROW_BYTES;
  // Offsets from the first query row.
  static constexpr u32 K = ROWS * ROW_BYTES, V = K + BUFFERS * TILE_BYTES, STATE = V + BUFFERS * TILE_BYTES;
  static constexpr u32 BYTES = STATE + sizeof(KvPrefillState);

  const KvPrefillParams& params;
  const KvAttendParams& p;
  u32 kv_head, thread, lane, warp;
  KvReach reach;
  u8 *q, *k, *v;  // [ROWS], [BUFFERS][TOKENS] rows
  u32 shared;     // q, in the shared window
  KvPrefillState& state;

  KV_DEV KvPrefillItem(const KvPrefillParams& params, u8* memory)
      : params(params), p(params.attend), state(*(KvPrefillState*)(memory + STATE)) {
    q = memory;
    k = memory + K;
    v = memory + V;
    shared = kv_smem_addr(memory);
    thread = threadIdx.x;
    lane = thread % 32;
    warp = thread / 32;
  }

  // Finds the work item of this thread block; false if there is none.
  KV_DEV bool find() {
    // Thread blocks start in the order of their ids. Heads vary fastest, so that the longest items of
    // all heads start first.
    const u32 id = blockIdx.y * gridDim.x + blockIdx.x, place = id / gridDim.y;
    kv_head = id % gridDim.y;
    if (place >= *(const u32*)params.count) return false;
    const KvWorkItem work = ((const KvWorkItem*)params.items)[place];
    const KvSequence sequence = ((const KvSequence*)p.plan.sequences)[work.sequence];
    const u32 first = work.row, left = sequence.q_len * p.group - first;
    const KvVisible lowest = kv_visible(p, sequence, first / p.group);
    const KvVisible highest = kv_visible(p, sequence, (first + (left < ROWS ? left : ROWS) - 1) / p.group);
    const u64 end = (u64)work.tile_end * KV_PREFILL_TILE;
    reach = kv_reach(lowest, highest, work.tile_begin * KV_PREFILL_TILE,
                     end < sequence.kv_len ? (u32)end : sequence.kv_len);
    if (thread == 0) state = {{0, 0}, highest.begin, lowest.end, lowest.sink_end, work.sequence, first, place};
    kv_sync();
    return true;
  }

  // Read from memory each time, to save registers.
  KV_DEV const KvSequence& sequence() const { return ((const KvSequence*)p.plan.sequences)[state.entry]; }
  KV_DEV const KvWorkItem& work() const { return ((const KvWorkItem*)params.items)[state.place]; }
  KV_DEV u32 rows() const {
    const u32 left = sequence().q_len * p.group - state.first;
    return left < ROWS ? left : ROWS;
  }
  KV_DEV u32 query_of(u32 row) const { return (state.first + row) / p.group; }
  KV_DEV u32 head_of(u32 row) const { return kv_head * p.group + (state.first + row) % p.group; }
  KV_DEV u8* row_of(const KvTensor& t, u32 row) const {
    return kv_head_row(t, state.entry, sequence().q_start, query_of(row), head_of(row));
  }
  // Returns the row of this lane's values `2 * half` and `2 * half + 1` of mma tile `m`.
  KV_DEV u32 own_row(u32 m, u32 half) const { return warp * WARP_ROWS + m * 16 + half * 8 + lane / 4; }

  // Returns the next tile that contains a visible key.
  KV_DEV u32 after(u32 tile) const { return tile == KV_NONE ? tile : kv_next_tile<TOKENS>(reach, tile + 1); }
  // Returns whether some row of the item may see a position.
  KV_DEV bool reaches(u32 position) const {
    return (position >= reach.begin && position < reach.end) || position < reach.sink_end;
  }
  KV_DEV bool reaches_all(u32 begin, u32 end) const {
    return (begin >= reach.begin && end <= reach.end) || end <= reach.sink_end;
  }
  // Returns whether every row sees every token of a tile.
  KV_DEV bool is_whole(u32 tile) const {
    const u32 start = tile * TOKENS, after = start + TOKENS;
    return (start >= state.begin && after <= state.end) || after <= state.sink_end;
  }
  KV_DEV static bool is_visible(const KvVisible& visible, u32 position) {
    return (position >= visible.begin && position < visible.end) || position < visible.sink_end;
  }
  KV_DEV void find_visible(KvVisible (&visible)[M][2]) const {
    const KvSequence& s = sequence();
    const u32 row = state.first + own_row(0, 0), end = state.first + rows();
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        const u32 own = row + (m * 16 + h * 8);
        visible[m][h] = {0, 0, 0};
        if (own < end) visible[m][h] = kv_visible(p, s, own / p.group);
      }
  }

  KV_DEV static u32 at(u32 row, u32 chunk) { return kv_swizzled(row, chunk, CHUNKS); }
  KV_DEV static u32 tile_at(u32 buffer) { return BUFFERS == 1 ? 0 : buffer * TILE_BYTES; }
  // Given the address of one of a row's first two chunks, `swizzled(at, c) + offset_of(c)` is that
  // of the one `c` further on; the offset becomes an immediate.
  KV_DEV static u32 swizzled(u32 at, u32 chunk) { return at ^ chunk % PERIOD * 16; }
  KV_DEV static constexpr u32 offset_of(u32 chunk) { return (chunk - chunk % PERIOD) * 16; }

  // Calls `each(shared address, tensor address, exists)` for the chunks of the warp's rows.
  template <class Each> KV_DEV void for_rows(const KvTensor& t, Each each) const {
    const u32 begin = warp * WARP_ROWS, nth = begin + lane % WARP_ROWS, end = rows();
    const u64 own = (u64)row_of(t, nth < end ? nth : 0);
#pragma unroll 4
    for (u32 i = lane; i < WARP_ROWS * CHUNKS; i += 32) {
      const u32 row = i / CHUNKS, chunk = i % CHUNKS;
      const u64 low = kv_shfl((u32)own, row), high = kv_shfl((u32)(own >> 32), row);
      each(q + at(begin + row, chunk), (u8*)(high << 32 | low) + chunk * 16, begin + row < end);
    }
  }
  KV_DEV void copy_queries() const {
    for_rows(p.q, [](u8* to, const u8* from, bool there) { kv_cp_async16(to, from, there); });
  }
  // Writes the results that the warp stored in place of its query rows.
  KV_DEV void store_rows() const {
    for_rows(p.out, [](const u8* from, u8* to, bool there) { if (there) *(KvWord4*)to = *(const KvWord4*)from; });
  }

  // Returns whether one of eight values of V is not finite.
  KV_DEV bool is_non_finite(u32 buffer, u32 token, u32 chunk) const {
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
      for (u32 m = 0; m < M; m++) kv_ldsm4_at(a[m], swizzled(queries, c) + (m * 16 * ROW_BYTES + offset_of(c)));
#pragma unroll
      for (u32 i = 0; i < TILES; i += 2) {
        kv_ldsm4_at(b, swizzled(keys, c) + (i * 8 * ROW_BYTES + offset_of(c)));
#pragma unroll
        for (u32 m = 0; m < M; m++) {
          kv_mma(T(), s[m][i], a[m], b[0], b[1]);
          kv_mma(T(), s[m][i + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // Accumulates P V of 16 tokens: those of mma tiles `i` and `i + 1`.
  KV_DEV void sum(float (&o)[M][COLUMNS][4], const u32 (&a)[M][4], u32 i, u32 buffer) const {
    const u32 values = shared + V + tile_at(buffer) + at(lane % 16, lane / 16);
#pragma unroll
    for (u32 c = 0; c < CHUNKS; c += 2) {
      u32 b[4];
      kv_ldsm4t_at(b, swizzled(values, c) + (i * 8 * ROW_BYTES + offset_of(c)));
#pragma unroll
      for (u32 m = 0; m < M; m++) {
        kv_mma(T(), o[m][c], a[m], b[0], b[1]);
        kv_mma(T(), o[m][c + 1], a[m], b[2], b[3]);
      }
    }
  }

  // Accumulates P V of all tokens value by value, skipping masked tokens, since zero times a
  // non-finite value is NaN.
  KV_DEV void sum_visible(float (&o)[M][COLUMNS][4], const u32 (&weights)[M][TILES][2], u32 start, u32 buffer) const {
    KvVisible visible[M][2];
    find_visible(visible);
#pragma unroll 1
    for (u32 token = 0; token < TOKENS; token++) {
      float weight[M][2];
      bool in_mask[M][2];
#pragma unroll
      for (u32 m = 0; m < M; m++)
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
          u32 pair = 0;
#pragma unroll
          for (u32 i = 0; i < TILES; i++) pair = token / 8 == i ? weights[m][i][h] : pair;
          // One of the four lanes of a row has the weight.
          pair = kv_shfl(pair, lane / 4 * 4 + token % 8 / 2);
          weight[m][h] = kv_to_float(T(), (u16)(pair >> token % 2 * 16));
          in_mask[m][h] = is_visible(visible[m][h], start + token);
        }
#pragma unroll
      for (u32 d = 0; d < COLUMNS; d++) {
        const u32 pair = *(const u32*)(v + tile_at(buffer) + at(token, d) + lane % 4 * 4);
        const float low = kv_to_float(T(), (u16)pair), high = kv_to_float(T(), (u16)(pair >> 16));
#pragma unroll
        for (u32 m = 0; m < M; m++)
#pragma unroll
          for (u32 h = 0; h < 2; h++) {
            if (!in_mask[m][h]) continue;
            o[m][d][2 * h] += weight[m][h] * low;
            o[m][d][2 * h + 1] += weight[m][h] * high;
          }
      }
    }
  }
};
