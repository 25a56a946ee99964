// What rows of queries see, in tiles, and how the tiles of a batch are cut into pieces. Twin of src/plan.rs, which says
// why it is done so: both must write the same bytes.
#pragma once
#include "rows.h"

constexpr u32 KV_DECODE_ROWS = 16;       // query rows of a piece: those of one mma
constexpr u32 KV_DECODE_TILE = 64;       // tokens of a tile
constexpr u32 KV_DECODE_OVERHEAD = 2;    // what a piece costs besides its tiles, in tiles
constexpr u32 KV_DECODE_END_MIN = 2;     // tiles that are worth a cut
constexpr u32 KV_DECODE_SHARE_MIN = 4;   // cost that is worth a slot
constexpr u32 KV_DECODE_INVARIANT = 16;  // tiles of a piece when the cut may not depend on the batch

struct KvDecodeMask { u32 full, window_left, sink_tokens; };

// AttentionOptions::visible: keys begin..end of query `i`.
struct KvDecodeSeen { u32 begin, end; };
KV_DEV KvDecodeSeen kv_decode_seen(const KvDecodeMask& mask, u32 q_len, u32 kv_len, u32 i) {
  const i64 position = (i64)kv_len - (i64)q_len + (i64)i;
  i64 begin = mask.window_left == 0xffffffffu ? 0 : position - (i64)mask.window_left;
  const i64 causal = position + 1 < 0 ? 0 : position + 1;
  const i64 end = mask.full || causal > (i64)kv_len ? (i64)kv_len : causal;
  if (begin < 0) begin = 0;
  if (begin > end) begin = end;
  return {(u32)begin, (u32)end};
}

// What 16 rows from `row` on see together: keys 0..sinks and begin..end, in tiles at multiples of their length. The
// first `sink_tiles` tiles begin at 0, the others go on from tile `first`, without a tile twice.
struct KvDecodeReach { u32 sinks, begin, end, sink_tiles, first, tiles; };
KV_DEV KvDecodeReach kv_decode_reach(const KvDecodeMask& mask, u32 q_len, u32 kv_len, u32 group, u32 row) {
  u32 last = (row + KV_DECODE_ROWS - 1) / group;
  if (last >= q_len) last = q_len - 1;
  const u32 begin = kv_decode_seen(mask, q_len, kv_len, row / group).begin;
  const u32 end = kv_decode_seen(mask, q_len, kv_len, last).end;
  KvDecodeReach r;
  r.begin = begin;
  r.end = end;
  r.sinks = mask.window_left == 0xffffffffu ? 0 : begin < mask.sink_tokens ? begin : mask.sink_tokens;
  r.first = begin / KV_DECODE_TILE;
  const u32 sink_tiles = r.sinks / KV_DECODE_TILE + (r.sinks % KV_DECODE_TILE > 0 ? 1 : 0);
  r.sink_tiles = sink_tiles < r.first ? sink_tiles : r.first;
  const u32 stop = end / KV_DECODE_TILE + (end % KV_DECODE_TILE > 0 ? 1 : 0);
  r.tiles = r.sink_tiles + (end > begin ? stop - r.first : 0);
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
  const u32 parts = tiles / KV_DECODE_INVARIANT + (tiles % KV_DECODE_INVARIANT > 0 || tiles == 0 ? 1 : 0);
  return (u64)tiles + (u64)parts * KV_DECODE_OVERHEAD;
}
KV_DEV KvDecodeCut kv_decode_cut(u64 at, u64 share, u32 tiles, bool invariant) {
  KvDecodeCut cut = {at, share, (u32)(at / share), 0, tiles, 1, invariant};
  cut.end = cut.begin;
  if (tiles == 0) return cut;
  if (invariant) {
    cut.parts = tiles / KV_DECODE_INVARIANT + (tiles % KV_DECODE_INVARIANT > 0 ? 1 : 0);
    return cut;
  }
  cut.first = at + KV_DECODE_OVERHEAD;
  const u64 stop = cut.first + tiles;
  cut.begin = (u32)(cut.first / share);
  cut.end = (u32)((stop - 1) / share);
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
    r.slot = (u32)((cut.first + (u64)part * (KV_DECODE_INVARIANT + KV_DECODE_OVERHEAD)) / cut.share);
    return r;
  }
  r.slot = cut.begin + part;
  if (part > 0) r.begin = (u32)((u64)r.slot * cut.share - cut.first);
  if (part + 1 < cut.parts) r.end = (u32)(((u64)r.slot + 1) * cut.share - cut.first);
  return r;
}
