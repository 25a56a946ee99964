// Masks: which keys a query sees (kv-core's AttentionOptions::visible), and iteration over the
// tiles that contain them.
#pragma once
#include "rows.h"

constexpr u32 KV_TILE = 32;  // tokens of a tile, which begins at a multiple of it
constexpr u32 KV_NONE = 0xffffffffu;

// Keys that one query sees: 0..sink_end and begin..end. No bound decreases from a query to the
// next.
struct KvVisible { u32 begin, end, sink_end; };

// Computes the visible keys of a query. `p` has the options of attention: KvAttendParams or
// KvDecodePlanParams. `s` has the lengths of the entry: KvSequence or KvWorkItem.
template <class Params, class Entry> KV_DEV KvVisible kv_visible(const Params& p, const Entry& s, u32 query) {
  const i64 len = (i64)s.kv_len, position = len - (i64)s.q_len + (i64)query;
  i64 begin = 0, end = len;
  if (p.window_left != KV_NONE && position > (i64)p.window_left) begin = position - (i64)p.window_left;
  if (p.full == 0) end = position + 1 < 0 ? 0 : position + 1 < len ? position + 1 : len;
  if (begin > end) begin = end;
  const u32 first = (u32)begin;
  return {first, (u32)end, p.sink_tokens < first ? p.sink_tokens : first};
}

// Keys that consecutive queries see in one KV split: sink_begin..sink_end and begin..end.
struct KvReach { u32 sink_begin, sink_end, begin, end; };

KV_DEV KvReach kv_reach(const KvVisible& first, const KvVisible& last, u32 split_begin, u32 split_end) {
  // Windows of neighbouring queries touch or overlap: the first and the last determine the union.
  u32 sink_end = last.sink_end < first.begin ? last.sink_end : first.begin;
  KvReach reach = {split_begin, sink_end < split_end ? sink_end : split_end, first.begin, last.end};
  if (reach.begin < split_begin) reach.begin = split_begin;
  if (reach.end > split_end) reach.end = split_end;
  return reach;
}

// Returns the first tile of TOKENS, at or after `tile`, that contains a visible key; otherwise
// KV_NONE.
template <u32 TOKENS = KV_TILE> KV_DEV u32 kv_next_tile(const KvReach& reach, u32 tile) {
  if (reach.sink_begin < reach.sink_end && (u64)tile * TOKENS < reach.sink_end) {
    const u32 first = reach.sink_begin / TOKENS;
    return tile > first ? tile : first;
  }
  if (reach.begin >= reach.end) return KV_NONE;
  const u32 first = reach.begin / TOKENS;
  if (tile < first) tile = first;
  return (u64)tile * TOKENS < reach.end ? tile : KV_NONE;
}

// The same among tiles `lane`, `lane + lanes`, ..; `lanes` is a power of two.
KV_DEV u32 kv_next_tile_of(const KvReach& reach, u32 tile, u32 lane, u32 lanes) {
  for (;;) {
    tile = kv_next_tile(reach, tile);
    const u32 ahead = (lane - tile) & (lanes - 1);
    if (tile == KV_NONE || ahead == 0) return tile;
    tile += ahead;
  }
}

// Returns a bit mask of tokens `begin..end` in the tile that starts at `start`.
KV_DEV u32 kv_bits(u32 begin, u32 end, u32 start) {
  const u32 from = begin > start ? begin - start : 0, to = end > start ? end - start : 0;
  const u32 below_to = to >= 32 ? KV_NONE : (1u << to) - 1, below_from = from >= 32 ? KV_NONE : (1u << from) - 1;
  return below_to & ~below_from;
}

KV_DEV u32 kv_reach_bits(const KvReach& reach, u32 start) {
  return kv_bits(reach.sink_begin, reach.sink_end, start) | kv_bits(reach.begin, reach.end, start);
}
KV_DEV u32 kv_visible_bits(const KvVisible& v, u32 start) {
  return kv_bits(0, v.sink_end, start) | kv_bits(v.begin, v.end, start);
}
