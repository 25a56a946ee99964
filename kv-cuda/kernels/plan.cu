// plan_decode: computes the decode schedule on the device, the same bytes as the host reference in
// src/decode/plan. One thread block, so that every replay of a captured graph plans anew for the
// current KvCounts.
//
// The unit of distribution is a query tile: 16 query rows of one kv head, which is split by itself.
// Threads take one sequence each to find where its work begins, then one query tile each, then one
// work item each; scans over the thread block give the offsets of each level.
//
// Launch: 1 block, 512 threads, KV_PLAN_SHARED bytes of shared memory.
#include "decode_plan.h"
#include "plan_scan.h"

// State of KV_PLAN_THREADS sequences and, at a time, as many query tiles.
struct KvPlanShared {
  u64 place[KV_PLAN_THREADS], cost[KV_PLAN_THREADS];  // of a sequence: its position, and the cost of one kv head
  u64 first[KV_PLAN_THREADS];                         // KvDecodeSplits of a query tile
  KvPlanScan scan;
  u32 query_tiles_end[KV_PLAN_THREADS];  // query tiles of the sequences up to this one
  u32 splits_end[KV_PLAN_THREADS];       // splits of the query tiles up to this one
  u32 begin[KV_PLAN_THREADS], tiles[KV_PLAN_THREADS], last[KV_PLAN_THREADS];  // last: slot of its last split
  u32 sequence[KV_PLAN_THREADS], head[KV_PLAN_THREADS], row[KV_PLAN_THREADS], partial[KV_PLAN_THREADS];
};
constexpr u32 KV_PLAN_SHARED = 30912;
static_assert(sizeof(KvPlanShared) == KV_PLAN_SHARED, "src/decode/plan.rs launches with this size");

struct KvPlanner {
  const KvDecodePlanParams& p;
  const KvSequence* sequences;
  bool invariant;

  KV_DEV u32 query_tiles(u32 sequence) const {
    if (sequences[sequence].q_len > p.q_len_max) return 0;
    const u64 rows = (u64)sequences[sequence].q_len * p.group;
    return (u32)((rows + KV_DECODE_ROWS - 1) / KV_DECODE_ROWS);
  }
  KV_DEV u32 tiles(u32 sequence, u32 tile_of_head) const {
    return kv_decode_reach(p, sequences[sequence], p.group, tile_of_head * KV_DECODE_ROWS).tiles;
  }
  // Returns the cost of the first query tiles of one kv head.
  KV_DEV u64 cost(u32 sequence, u32 per_head) const {
    u64 sum = 0;
#pragma unroll 1
    for (u32 i = 0; i < per_head; i++) sum += kv_decode_cost(tiles(sequence, i), invariant);
    return sum;
  }
};

// Numbers of work items and partial results so far, and the first slot whose start is not written.
struct KvPlanned { u32 items, partials, slot; };

// Splits query tile `query_tile` of the sequences from `chunk` on; no splits past the last tile.
KV_DEV KvDecodeSplits kv_plan_query_tile(const KvPlanner& planner, KvPlanShared& s, u32 chunk, u32 query_tile,
                                         u32 query_tiles, u64 share) {
  const u32 thread = threadIdx.x;
  if (query_tile >= query_tiles) return {0, 1, 0, 0, 0, 0, false};
  const u32 owner = kv_plan_find(s.query_tiles_end, query_tile);
  const u32 sequence = chunk + owner, per_head = planner.query_tiles(sequence);
  const u32 inside = query_tile - (owner > 0 ? s.query_tiles_end[owner - 1] : 0);
  u32 head = inside, tile_of_head = 0;
  u64 at = s.place[owner];
  if (per_head > 1) {
    head = inside / per_head, tile_of_head = inside % per_head;
    at += planner.cost(sequence, tile_of_head);
  }
  s.sequence[thread] = sequence, s.head[thread] = head, s.row[thread] = tile_of_head * KV_DECODE_ROWS;
  return kv_decode_splits(at + s.cost[owner] * head, share, planner.tiles(sequence, tile_of_head), planner.invariant);
}

// Writes the work item of split `index` among those in shared memory, and the starts of slots up to
// its own.
KV_DEV void kv_plan_work_item(const KvPlanner& planner, const KvPlanShared& s, u32 index, u64 share,
                              const KvPlanned& done) {
  const u32 query_tile = kv_plan_find(s.splits_end, index);
  const u32 before = query_tile > 0 ? s.splits_end[query_tile - 1] : 0, split = index - before;
  const KvDecodeSplits splits = {s.first[query_tile], share, s.begin[query_tile], 0, s.tiles[query_tile],
                                 s.splits_end[query_tile] - before, planner.invariant};
  const KvDecodeSplit r = kv_decode_split(splits, split);
  u32 slot = query_tile > 0 ? s.last[query_tile - 1] + 1 : done.slot;
  if (split > 0) slot = kv_decode_split(splits, split - 1).slot + 1;
#pragma unroll 1
  for (; slot <= r.slot; slot++) ((u32*)planner.p.starts)[slot] = done.items + index;
  const KvSequence& sequence = planner.sequences[s.sequence[query_tile]];
  KvWord4* item = (KvWord4*)planner.p.items + 3 * (u64)(done.items + index);
  item[0] = {s.sequence[query_tile], s.head[query_tile], s.row[query_tile], r.begin};
  item[1] = {r.end, split, splits.num_splits, s.partial[query_tile]};
  item[2] = {sequence.kv_len, sequence.q_len, sequence.q_start, sequence.table};
}

KV_DEV void kv_plan_query_tiles(const KvPlanner& planner, KvPlanShared& s, u32 chunk, u32 query_tiles,
                                u64 share, KvPlanned& done) {
  const u32 thread = threadIdx.x;
#pragma unroll 1
  for (u32 base = 0; base < query_tiles; base += KV_PLAN_THREADS) {
    const KvDecodeSplits splits = kv_plan_query_tile(planner, s, chunk, base + thread, query_tiles, share);
    const u32 partials = splits.num_splits > 1 ? splits.num_splits : 0;
    KvPlanSum total;
    const KvPlanSum ends = kv_plan_scan(s.scan, {partials, splits.num_splits}, total);
    s.first[thread] = splits.first, s.begin[thread] = splits.begin, s.tiles[thread] = splits.tiles;
    s.splits_end[thread] = ends.count;
    s.partial[thread] = partials > 0 ? done.partials + (u32)ends.value - partials : 0;
    s.last[thread] = splits.num_splits > 0 ? kv_decode_split(splits, splits.num_splits - 1).slot : 0;
    kv_sync();
#pragma unroll 1
    for (u32 i = thread; i < total.count; i += KV_PLAN_THREADS) kv_plan_work_item(planner, s, i, share, done);
    done.items += total.count;
    done.partials += (u32)total.value;
    done.slot = s.last[query_tiles - base < KV_PLAN_THREADS ? query_tiles - base - 1 : KV_PLAN_THREADS - 1] + 1;
    kv_sync();
  }
}

KV_DEV void kv_plan_decode(const KvDecodePlanParams& p) {
  KV_DYN_SMEM(shared);
  KvPlanShared& s = *(KvPlanShared*)shared;
  const u32 thread = threadIdx.x;
  const KvPlanner planner = {p, (const KvSequence*)p.plan.sequences, p.invariant != 0};
  const u32 sequences = ((const KvCounts*)p.plan.counts)->sequences;
  KvPlanSum all = {0, 0}, total;
#pragma unroll 1
  for (u32 i = thread; i < sequences; i += KV_PLAN_THREADS) {
    all.value += planner.cost(i, planner.query_tiles(i)) * p.kv_heads;
  }
  kv_plan_scan(s.scan, all, total);
  u64 share = (total.value + p.slots - 1) / p.slots;
  if (share < KV_DECODE_SHARE_MIN) share = KV_DECODE_SHARE_MIN;
  KvPlanned done = {0, 0, 0};
  u64 at = 0;
#pragma unroll 1
  for (u32 chunk = 0; chunk < sequences; chunk += KV_PLAN_THREADS) {
    const u32 sequence = chunk + thread, per_head = sequence < sequences ? planner.query_tiles(sequence) : 0;
    const u64 cost = planner.cost(sequence, per_head), own = cost * p.kv_heads;
    kv_sync();
    const KvPlanSum ends = kv_plan_scan(s.scan, {own, per_head * p.kv_heads}, total);
    s.place[thread] = at + ends.value - own, s.cost[thread] = cost, s.query_tiles_end[thread] = ends.count;
    kv_sync();
    kv_plan_query_tiles(planner, s, chunk, total.count, share, done);
    at += total.value;
  }
#pragma unroll 1
  for (u32 i = done.slot + thread; i <= p.slots; i += KV_PLAN_THREADS) ((u32*)p.starts)[i] = done.items;
}

KV_KERNEL(plan_decode, KvDecodePlanParams, 512, 1, kv_plan_decode)
