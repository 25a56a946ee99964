// Who sees what: kv-core's AttentionOptions::visible, kv-cpu's Reach and the walk over its tiles.
#pragma once
#include "rows.h"

constexpr u32 KV_TILE = 32;  // tokens that are scored and summed together, at multiples of it
constexpr u32 KV_NONE = 0xffffffffu;

// Keys that one query sees: 0..sinks and begin..end. No bound falls from one query to the next.
struct KvVisible { u32 begin, end, sinks; };

// `p` has the options of attention: KvAttendParams, KvDecodePlanParams.
template <class Params> KV_DEV KvVisible kv_visible(const Params& p, const KvSequence& s, u32 query) {
  const i64 len = (i64)s.kv_len, position = len - (i64)s.q_len + (i64)query;
  i64 begin = 0, end = len;
  if (p.window_left != KV_NONE && position > (i64)p.window_left) begin = position - (i64)p.window_left;
  if (p.full == 0) end = position + 1 < 0 ? 0 : position + 1 < len ? position + 1 : len;
  if (begin > end) begin = end;
  const u32 first = (u32)begin;
  return {first, (u32)end, p.sink_tokens < first ? p.sink_tokens : first};
}

// What queries that follow each other see of one part of a context.
struct KvReach { u32 sinks_begin, sinks_end, begin, end; };

KV_DEV KvReach kv_reach(const KvVisible& first, const KvVisible& last, u32 part_begin, u32 part_end) {
  // Windows of neighbours touch, so the first query and the last tell the union.
  u32 sinks = last.sinks < first.begin ? last.sinks : first.begin;
  KvReach reach = {part_begin, sinks < part_end ? sinks : part_end, first.begin, last.end};
  if (reach.begin < part_begin) reach.begin = part_begin;
  if (reach.end > part_end) reach.end = part_end;
  return reach;
}

// The first tile of TOKENS at or behind `tile` in which something is seen; KV_NONE behind the last.
template <u32 TOKENS = KV_TILE> KV_DEV u32 kv_next_tile(const KvReach& reach, u32 tile) {
  if (reach.sinks_begin < reach.sinks_end && (u64)tile * TOKENS < reach.sinks_end) {
    const u32 first = reach.sinks_begin / TOKENS;
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

// Tokens `begin..end` of the tile that starts at `start`, as bits.
KV_DEV u32 kv_bits(u32 begin, u32 end, u32 start) {
  const u32 from = begin > start ? begin - start : 0, to = end > start ? end - start : 0;
  const u32 below_to = to >= 32 ? KV_NONE : (1u << to) - 1, below_from = from >= 32 ? KV_NONE : (1u << from) - 1;
  return below_to & ~below_from;
}

KV_DEV u32 kv_reach_bits(const KvReach& reach, u32 start) {
  return kv_bits(reach.sinks_begin, reach.sinks_end, start) | kv_bits(reach.begin, reach.end, start);
}
KV_DEV u32 kv_visible_bits(const KvVisible& v, u32 start) {
  return kv_bits(0, v.sinks, start) | kv_bits(v.begin, v.end, start);
}
