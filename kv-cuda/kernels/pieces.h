// What rows of queries see, in tiles, and how the tiles of a batch are cut into pieces. Twin of src/plan.rs, which says
// why it is done so: both must write the same bytes.
#pragma once
#include "visible.h"

constexpr u32 KV_DECODE_ROWS = 16;       // query rows of a piece: those of one mma
constexpr u32 KV_DECODE_TILE = 64;       // tokens of a tile
constexpr u32 KV_DECODE_OVERHEAD = 2;    // what a piece costs besides its tiles, in tiles
constexpr u32 KV_DECODE_END_MIN = 3;     // tiles that are worth a cut
constexpr u32 KV_DECODE_SHARE_MIN = 4;   // cost that is worth a slot
constexpr u32 KV_DECODE_INVARIANT = 16;  // tiles of a piece when the cut may not depend on the batch

// What 16 rows from `row` on see together: keys 0..sinks and begin..end, in tiles at multiples of their length. The
// first `sink_tiles` tiles begin at 0, the others go on from tile `first`, without a tile twice.
struct KvDecodeReach { u32 sinks, begin, end, sink_tiles, first, tiles; };
KV_DEV u32 kv_decode_up(u32 n, u32 step) { return n / step + (n % step > 0 ? 1 : 0); }
template <class Params>
KV_DEV KvDecodeReach kv_decode_reach(const Params& p, const KvSequence& sequence, u32 group, u32 row) {
  u32 last = (row + KV_DECODE_ROWS - 1) / group;
  if (last >= sequence.q_len) last = sequence.q_len - 1;
  const KvVisible lowest = kv_visible(p, sequence, row / group);
  KvDecodeReach r = {lowest.sinks, lowest.begin, kv_visible(p, sequence, last).end, 0, 0, 0};
  r.first = r.begin / KV_DECODE_TILE;
  const u32 sink_tiles = kv_decode_up(r.sinks, KV_DECODE_TILE);
  r.sink_tiles = sink_tiles < r.first ? sink_tiles : r.first;
  r.tiles = r.sink_tiles + (r.end > r.begin ? kv_decode_up(r.end, KV_DECODE_TILE) - r.first : 0);
  return r;
}

// Pieces of 16 rows with `tiles` tiles, from place `at` of the whole work on, of which every slot has `share`.
struct KvDecodeCut {
  u64 first, share;  // place of the first tile
  u32 begin, end;    // slots, where pieces are cut at shares
  u32 tiles, parts;
  bool invariant;
};
KV_DEV u64 kv_decode_cost(u32 tiles, bool invariant) {
  if (!invariant) return (u64)tiles + KV_DECODE_OVERHEAD;
  const u32 parts = tiles == 0 ? 1 : kv_decode_up(tiles, KV_DECODE_INVARIANT);
  return (u64)tiles + (u64)parts * KV_DECODE_OVERHEAD;
}
// The slot of a place, divided in 32 bits where they are enough: they are but for batches of many million tokens.
KV_DEV u32 kv_decode_slot(u64 place, u64 share) {
  if (((place | share) >> 32) == 0) return (u32)place / (u32)share;
  return (u32)(place / share);
}
KV_DEV KvDecodeCut kv_decode_cut(u64 at, u64 share, u32 tiles, bool invariant) {
  KvDecodeCut cut = {at, share, kv_decode_slot(at, share), 0, tiles, 1, invariant};
  cut.end = cut.begin;
  if (tiles == 0) return cut;
  if (invariant) {
    cut.parts = kv_decode_up(tiles, KV_DECODE_INVARIANT);
    return cut;
  }
  cut.first = at + KV_DECODE_OVERHEAD;
  const u64 stop = cut.first + tiles;
  cut.begin = kv_decode_slot(cut.first, share);
  cut.end = kv_decode_slot(stop - 1, share);
  // Ends too short to pay for a piece of their own go to the neighbour.
  if (cut.begin < cut.end && ((u64)cut.begin + 1) * share - cut.first < KV_DECODE_END_MIN) cut.begin++;
  if (cut.begin < cut.end && stop - (u64)cut.end * share < KV_DECODE_END_MIN) cut.end--;
  cut.parts = cut.end - cut.begin + 1;
  return cut;
}
struct KvDecodePart { u32 slot, begin, end; };
KV_DEV KvDecodePart kv_decode_part(const KvDecodeCut& cut, u32 part) {
  KvDecodePart r = {cut.begin, 0, cut.tiles};
  if (cut.invariant) {
    r.begin = part * KV_DECODE_INVARIANT;
    if (part + 1 < cut.parts) r.end = r.begin + KV_DECODE_INVARIANT;
    r.slot = kv_decode_slot(cut.first + (u64)part * (KV_DECODE_INVARIANT + KV_DECODE_OVERHEAD), cut.share);
    return r;
  }
  r.slot = cut.begin + part;
  if (part > 0) r.begin = (u32)((u64)r.slot * cut.share - cut.first);
  if (part + 1 < cut.parts) r.end = (u32)(((u64)r.slot + 1) * cut.share - cut.first);
  return r;
}
