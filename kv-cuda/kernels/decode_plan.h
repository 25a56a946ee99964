// The decode schedule: the KV tiles that query rows see, and how a batch is divided into work
// items. src/decode/plan.rs explains it; its host reference writes the same bytes.
#pragma once
#include "visible.h"

constexpr u32 KV_DECODE_ROWS = 16;       // query rows of a work item: M of one mma
constexpr u32 KV_DECODE_TILE = 64;       // tokens of a tile
constexpr u32 KV_DECODE_OVERHEAD = 2;    // cost of a work item besides its tiles, in tiles
constexpr u32 KV_DECODE_END_MIN = 3;     // minimum tiles of a split at either end of a query tile
constexpr u32 KV_DECODE_SHARE_MIN = 4;   // minimum cost of a slot
constexpr u32 KV_DECODE_INVARIANT = 16;  // tiles of a split if splits may not depend on the batch

// Keys that the 16 rows from `row` on see together: 0..sink_end and begin..end, in tiles aligned to
// their length. The first `sink_tiles` tiles begin at 0, the others at tile `first`; no tile occurs
// twice.
struct KvDecodeReach { u32 sink_end, begin, end, sink_tiles, first, tiles; };
KV_DEV u32 kv_decode_up(u32 n, u32 step) { return n / step + (n % step > 0 ? 1 : 0); }
template <class Params, class Entry>
KV_DEV KvDecodeReach kv_decode_reach(const Params& p, const Entry& sequence, u32 group, u32 row) {
  u32 last = (row + KV_DECODE_ROWS - 1) / group;
  if (last >= sequence.q_len) last = sequence.q_len - 1;
  const KvVisible lowest = kv_visible(p, sequence, row / group);
  KvDecodeReach r = {lowest.sink_end, lowest.begin, kv_visible(p, sequence, last).end, 0, 0, 0};
  r.first = r.begin / KV_DECODE_TILE;
  const u32 sink_tiles = kv_decode_up(r.sink_end, KV_DECODE_TILE);
  r.sink_tiles = sink_tiles < r.first ? sink_tiles : r.first;
  r.tiles = r.sink_tiles + (r.end > r.begin ? kv_decode_up(r.end, KV_DECODE_TILE) - r.first : 0);
  return r;
}

// The KV splits of a query tile that has `tiles` KV tiles. The work of the batch is laid out on one
// line, of which every slot owns `share`.
struct KvDecodeSplits {
  u64 first, share;  // first: position of the first tile; if splits are invariant, of the query tile
  u32 begin, end;    // slots of the first and the last split, unless splits are invariant
  u32 tiles, num_splits;
  bool invariant;
};
KV_DEV u64 kv_decode_cost(u32 tiles, bool invariant) {
  if (!invariant) return (u64)tiles + KV_DECODE_OVERHEAD;
  const u32 num_splits = tiles == 0 ? 1 : kv_decode_up(tiles, KV_DECODE_INVARIANT);
  return (u64)tiles + (u64)num_splits * KV_DECODE_OVERHEAD;
}
// Returns the slot of a position. Divides in 32 bits if they suffice: only batches of many million
// tokens need more.
KV_DEV u32 kv_decode_slot(u64 place, u64 share) {
  if (((place | share) >> 32) == 0) return (u32)place / (u32)share;
  return (u32)(place / share);
}
KV_DEV KvDecodeSplits kv_decode_splits(u64 at, u64 share, u32 tiles, bool invariant) {
  KvDecodeSplits splits = {at, share, kv_decode_slot(at, share), 0, tiles, 1, invariant};
  splits.end = splits.begin;
  if (tiles == 0) return splits;
  if (invariant) {
    splits.num_splits = kv_decode_up(tiles, KV_DECODE_INVARIANT);
    return splits;
  }
  splits.first = at + KV_DECODE_OVERHEAD;
  const u64 stop = splits.first + tiles;
  splits.begin = kv_decode_slot(splits.first, share);
  splits.end = kv_decode_slot(stop - 1, share);
  // A split that is too short to be worth its overhead goes to its neighbour.
  if (splits.begin < splits.end && ((u64)splits.begin + 1) * share - splits.first < KV_DECODE_END_MIN) splits.begin++;
  if (splits.begin < splits.end && stop - (u64)splits.end * share < KV_DECODE_END_MIN) splits.end--;
  splits.num_splits = splits.end - splits.begin + 1;
  return splits;
}
struct KvDecodeSplit { u32 slot, begin, end; };
KV_DEV KvDecodeSplit kv_decode_split(const KvDecodeSplits& splits, u32 split) {
  KvDecodeSplit r = {splits.begin, 0, splits.tiles};
  if (splits.invariant) {
    r.begin = split * KV_DECODE_INVARIANT;
    if (split + 1 < splits.num_splits) r.end = r.begin + KV_DECODE_INVARIANT;
    r.slot = kv_decode_slot(splits.first + (u64)split * (KV_DECODE_INVARIANT + KV_DECODE_OVERHEAD), splits.share);
    return r;
  }
  r.slot = splits.begin + split;
  if (split > 0) r.begin = (u32)((u64)r.slot * splits.share - splits.first);
  if (split + 1 < splits.num_splits) r.end = (u32)(((u64)r.slot + 1) * splits.share - splits.first);
  return r;
}
