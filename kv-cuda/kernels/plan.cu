// The plan of decoding, made on the device: src/plan.rs says what it is, and both write the same bytes. One warp, so
// that a captured graph plans every replay anew by what KvCounts says.
//
// Lanes share the sequences to find where each one's work begins, then the (kv head, 16 query rows) items of 32
// sequences at a time, each of which is cut on its own.
#include "pieces.h"

KV_DEV u64 kv_plan_shfl(u64 v, u32 lane) {
  return (u64)kv_shfl((u32)v, lane) | ((u64)kv_shfl((u32)(v >> 32), lane) << 32);
}
// Sum over the lanes up to this one.
KV_DEV u64 kv_plan_scan(u64 v, u32 lane) {
  for (u32 step = 1; step < 32; step *= 2) {
    const u64 other = kv_plan_shfl(v, lane < step ? lane : lane - step);
    if (lane >= step) v += other;
  }
  return v;
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
    for (u32 i = 0; i < row_tiles; i++) sum += kv_decode_cost(tiles(sequence, i), invariant);
    return sum;
  }
};

// What the pieces before left for those that follow.
struct KvPlanned { u32 pieces, partials, slot; };  // slot: the first whose start is not written

KV_DEV void kv_plan_items(const KvPlanner& planner, u32 chunk, u64 at, u32 items, u64 cost, u64 share, u32 lane,
                          KvPlanned& done) {
  const u32 items_end = (u32)kv_plan_scan(items, lane);
  const u64 begin = at + kv_plan_scan(cost, lane) - cost;
  const u32 total = kv_shfl(items_end, 31);
  for (u32 base = 0; base < total; base += 32) {
    const u32 item = base + lane;
    u32 owner = 0;  // lanes whose items all come before
    for (u32 step = 16; step > 0; step /= 2) {
      if (kv_shfl(items_end, owner + step - 1) <= item) owner += step;
    }
    const u32 before = kv_shfl(items_end - items, owner);
    const u64 place = kv_plan_shfl(begin, owner);
    const bool active = item < total;
    KvPiece piece = {chunk + owner, 0, 0, 0, 0, 0, 0, 0};
    KvDecodeCut cut = {0, 1, 0, 0, 0, 0, false};
    if (active) {
      const u32 row_tiles = planner.row_tiles(piece.sequence), row_tile = (item - before) % row_tiles;
      piece.head = (item - before) / row_tiles;
      piece.row = row_tile * KV_DECODE_ROWS;
      const u64 heads = planner.cost(piece.sequence, row_tiles) * piece.head;
      cut = kv_decode_cut(place + heads + planner.cost(piece.sequence, row_tile), share,
                          planner.tiles(piece.sequence, row_tile), planner.invariant);
    }
    piece.parts = cut.parts;
    const u32 partials = cut.parts > 1 ? cut.parts : 0;
    const u64 scanned = kv_plan_scan((u64)cut.parts | ((u64)partials << 32), lane);
    u32 index = done.pieces + (u32)scanned - cut.parts;
    if (partials > 0) piece.partial = done.partials + (u32)(scanned >> 32) - partials;
    const u32 last = active ? kv_decode_part(cut, cut.parts - 1).slot : 0;
    const u32 previous = kv_shfl(last, lane == 0 ? 0 : lane - 1);
    u32 slot = lane == 0 ? done.slot : previous + 1;  // the first whose start is not written
    for (u32 i = 0; i < cut.parts; i++, index++) {
      const KvDecodePart part = kv_decode_part(cut, i);
      for (; slot <= part.slot; slot++) ((u32*)planner.p.starts)[slot] = index;
      piece.tile_begin = part.begin;
      piece.tile_end = part.end;
      piece.part = i;
      ((KvPiece*)planner.p.pieces)[index] = piece;
    }
    const u64 sums = kv_plan_shfl(scanned, 31);
    done.pieces += (u32)sums;
    done.partials += (u32)(sums >> 32);
    done.slot = kv_shfl(last, total - base > 31 ? 31 : total - base - 1) + 1;
  }
}

KV_DEV void kv_plan_decode(const KvDecodePlanParams& p) {
  const u32 lane = threadIdx.x;
  const KvPlanner planner = {p, (const KvSequence*)p.plan.sequences, p.invariant != 0};
  const u32 sequences = ((const KvCounts*)p.plan.counts)->sequences;
  u64 total = 0;
  for (u32 i = lane; i < sequences; i += 32) total += planner.cost(i, planner.row_tiles(i)) * p.kv_heads;
  total = kv_plan_shfl(kv_plan_scan(total, lane), 31);
  u64 share = total / p.slots + (total % p.slots > 0 ? 1 : 0);
  if (share < KV_DECODE_SHARE_MIN) share = KV_DECODE_SHARE_MIN;
  KvPlanned done = {0, 0, 0};
  u64 at = 0;
  for (u32 chunk = 0; chunk < sequences; chunk += 32) {
    const u32 row_tiles = chunk + lane < sequences ? planner.row_tiles(chunk + lane) : 0;
    const u64 cost = row_tiles == 0 ? 0 : planner.cost(chunk + lane, row_tiles) * p.kv_heads;
    kv_plan_items(planner, chunk, at, row_tiles * p.kv_heads, cost, share, lane, done);
    at += kv_plan_shfl(kv_plan_scan(cost, lane), 31);
  }
  for (u32 i = done.slot + lane; i <= p.slots; i += 32) ((u32*)p.starts)[i] = done.pieces;
}

KV_KERNEL(plan_decode, KvDecodePlanParams, 32, 1, kv_plan_decode)
