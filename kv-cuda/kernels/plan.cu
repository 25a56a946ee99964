// The plan of decoding, made on the device: src/decode/plan.rs says what it is, and both write the same bytes. One block,
// so that a captured graph plans every replay anew by what KvCounts says.
//
// Threads take a sequence each to find where its work begins, then an item each, which is 16 query rows of a kv head and
// is cut on its own, then a piece each. Scans over the block tell where the next ones begin. Shared memory:
// KV_PLAN_SHARED bytes.
#include "pieces.h"

constexpr u32 KV_PLAN_THREADS = 512, KV_PLAN_WARPS = KV_PLAN_THREADS / 32;

// What the block knows of KV_PLAN_THREADS sequences and as many items at a time.
struct KvPlanShared {
  u64 place[KV_PLAN_THREADS], cost[KV_PLAN_THREADS];  // of a sequence: where it begins, what one kv head costs
  u64 first[KV_PLAN_THREADS];                         // KvDecodeCut of an item
  u64 sums[KV_PLAN_WARPS];
  u32 counts[KV_PLAN_WARPS];
  u32 items_end[KV_PLAN_THREADS];  // items of this sequence and those before
  u32 parts_end[KV_PLAN_THREADS];  // parts of this item and those before
  u32 begin[KV_PLAN_THREADS], tiles[KV_PLAN_THREADS], last[KV_PLAN_THREADS];  // last: the slot of its last part
  u32 sequence[KV_PLAN_THREADS], head[KV_PLAN_THREADS], row[KV_PLAN_THREADS], partial[KV_PLAN_THREADS];
};
constexpr u32 KV_PLAN_SHARED = 30912;
static_assert(sizeof(KvPlanShared) == KV_PLAN_SHARED, "what src/decode/plan.rs asks for");

// A sum over the threads up to this one, and over all. Between two scans the block must meet once more.
struct KvPlanSum { u64 value; u32 count; };
KV_DEV KvPlanSum kv_plan_scan(KvPlanShared& s, KvPlanSum v, KvPlanSum& total) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 from = lane < step ? lane : lane - step;
    const u64 low = kv_shfl((u32)v.value, from), high = kv_shfl((u32)(v.value >> 32), from);
    const u32 count = kv_shfl(v.count, from);
    if (lane >= step) v = {v.value + (low | high << 32), v.count + count};
  }
  if (lane == 31) s.sums[warp] = v.value, s.counts[warp] = v.count;
  kv_sync();
  total = {0, 0};
#pragma unroll 4
  for (u32 i = 0; i < KV_PLAN_WARPS; i++) {
    if (i == warp) v = {v.value + total.value, v.count + total.count};
    total = {total.value + s.sums[i], total.count + s.counts[i]};
  }
  return v;
}

// The first of KV_PLAN_THREADS running sums that is above `at`; there is one.
KV_DEV u32 kv_plan_find(const u32* ends, u32 at) {
  u32 owner = 0;
#pragma unroll 1
  for (u32 step = KV_PLAN_THREADS / 2; step > 0; step /= 2) {
    if (ends[owner + step - 1] <= at) owner += step;
  }
  return owner;
}

struct KvPlanner {
  const KvDecodePlanParams& p;
  const KvSequence* sequences;
  bool invariant;

  KV_DEV u32 row_tiles(u32 sequence) const {
    if (sequences[sequence].q_len > p.q_len_max) return 0;
    const u64 rows = (u64)sequences[sequence].q_len * p.group;
    return (u32)((rows + KV_DECODE_ROWS - 1) / KV_DECODE_ROWS);
  }
  KV_DEV u32 tiles(u32 sequence, u32 row_tile) const {
    return kv_decode_reach(p, sequences[sequence], p.group, row_tile * KV_DECODE_ROWS).tiles;
  }
  // Cost of the first row tiles of one kv head.
  KV_DEV u64 cost(u32 sequence, u32 row_tiles) const {
    u64 sum = 0;
#pragma unroll 1
    for (u32 i = 0; i < row_tiles; i++) sum += kv_decode_cost(tiles(sequence, i), invariant);
    return sum;
  }
};

// What the pieces before left for those that follow.
struct KvPlanned { u32 pieces, partials, slot; };  // slot: the first whose start is not written

// Cuts item `item` of the sequences from `chunk` on; no parts where there is no such item.
KV_DEV KvDecodeCut kv_plan_item(const KvPlanner& planner, KvPlanShared& s, u32 chunk, u32 item, u32 items, u64 share) {
  const u32 thread = threadIdx.x;
  if (item >= items) return {0, 1, 0, 0, 0, 0, false};
  const u32 owner = kv_plan_find(s.items_end, item);
  const u32 sequence = chunk + owner, row_tiles = planner.row_tiles(sequence);
  const u32 inside = item - (owner > 0 ? s.items_end[owner - 1] : 0);
  u32 head = inside, row_tile = 0;
  u64 at = s.place[owner];
  if (row_tiles > 1) {
    head = inside / row_tiles, row_tile = inside % row_tiles;
    at += planner.cost(sequence, row_tile);
  }
  s.sequence[thread] = sequence, s.head[thread] = head, s.row[thread] = row_tile * KV_DECODE_ROWS;
  return kv_decode_cut(at + s.cost[owner] * head, share, planner.tiles(sequence, row_tile), planner.invariant);
}

// Writes part `index` of those of the items in shared memory, and the starts of slots up to its own.
KV_DEV void kv_plan_piece(const KvPlanner& planner, const KvPlanShared& s, u32 index, u64 share,
                          const KvPlanned& done) {
  const u32 item = kv_plan_find(s.parts_end, index);
  const u32 before = item > 0 ? s.parts_end[item - 1] : 0, part = index - before;
  const KvDecodeCut cut = {s.first[item], share, s.begin[item], 0, s.tiles[item], s.parts_end[item] - before,
                           planner.invariant};
  const KvDecodePart r = kv_decode_part(cut, part);
  u32 slot = item > 0 ? s.last[item - 1] + 1 : done.slot;
  if (part > 0) slot = kv_decode_part(cut, part - 1).slot + 1;
#pragma unroll 1
  for (; slot <= r.slot; slot++) ((u32*)planner.p.starts)[slot] = done.pieces + index;
  KvWord4* piece = (KvWord4*)planner.p.pieces + 2 * (u64)(done.pieces + index);
  piece[0] = {s.sequence[item], s.head[item], s.row[item], r.begin};
  piece[1] = {r.end, part, cut.parts, s.partial[item]};
}

KV_DEV void kv_plan_items(const KvPlanner& planner, KvPlanShared& s, u32 chunk, u32 items, u64 share,
                          KvPlanned& done) {
  const u32 thread = threadIdx.x;
#pragma unroll 1
  for (u32 base = 0; base < items; base += KV_PLAN_THREADS) {
    const KvDecodeCut cut = kv_plan_item(planner, s, chunk, base + thread, items, share);
    const u32 partials = cut.parts > 1 ? cut.parts : 0;
    KvPlanSum total;
    const KvPlanSum ends = kv_plan_scan(s, {partials, cut.parts}, total);
    s.first[thread] = cut.first, s.begin[thread] = cut.begin, s.tiles[thread] = cut.tiles;
    s.parts_end[thread] = ends.count;
    s.partial[thread] = partials > 0 ? done.partials + (u32)ends.value - partials : 0;
    s.last[thread] = cut.parts > 0 ? kv_decode_part(cut, cut.parts - 1).slot : 0;
    kv_sync();
#pragma unroll 1
    for (u32 i = thread; i < total.count; i += KV_PLAN_THREADS) kv_plan_piece(planner, s, i, share, done);
    done.pieces += total.count;
    done.partials += (u32)total.value;
    done.slot = s.last[items - base < KV_PLAN_THREADS ? items - base - 1 : KV_PLAN_THREADS - 1] + 1;
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
    all.value += planner.cost(i, planner.row_tiles(i)) * p.kv_heads;
  }
  kv_plan_scan(s, all, total);
  u64 share = (total.value + p.slots - 1) / p.slots;
  if (share < KV_DECODE_SHARE_MIN) share = KV_DECODE_SHARE_MIN;
  KvPlanned done = {0, 0, 0};
  u64 at = 0;
#pragma unroll 1
  for (u32 chunk = 0; chunk < sequences; chunk += KV_PLAN_THREADS) {
    const u32 sequence = chunk + thread, row_tiles = sequence < sequences ? planner.row_tiles(sequence) : 0;
    const u64 cost = planner.cost(sequence, row_tiles), own = cost * p.kv_heads;
    kv_sync();
    const KvPlanSum ends = kv_plan_scan(s, {own, row_tiles * p.kv_heads}, total);
    s.place[thread] = at + ends.value - own, s.cost[thread] = cost, s.items_end[thread] = ends.count;
    kv_sync();
    kv_plan_items(planner, s, chunk, total.count, share, done);
    at += total.value;
  }
#pragma unroll 1
  for (u32 i = done.slot + thread; i <= p.slots; i += KV_PLAN_THREADS) ((u32*)p.starts)[i] = done.pieces;
}

KV_KERNEL(plan_decode, KvDecodePlanParams, 512, 1, kv_plan_decode)
