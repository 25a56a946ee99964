// The prefill schedule: the query tiles of a batch, and the KV splits of long contexts.
//
// A query tile is `rows` query rows of one sequence, for every kv head. With enough of them, each is
// one work item. With fewer, contexts longer than a length are split, so that there is a work item
// for every slot; the length is the same for the whole batch. If splits may not depend on the batch,
// the length is fixed, and only sequences whose own query tiles are few are split.
//
// src/params.rs mirrors the structures. They are apart from those of params.h, which every kernel
// includes.
#pragma once
#include "visible.h"

constexpr u32 KV_PREFILL_TILE = 64;         // tokens of a KV tile of the schedule
constexpr u32 KV_PREFILL_OVERHEAD = 4;      // cost of a work item besides its tiles, in tiles
constexpr u32 KV_PREFILL_SPLIT_MIN = 8;     // minimum tiles of a split, except the last
constexpr u32 KV_PREFILL_INVARIANT = 64;    // tiles of a split if splits may not depend on the batch
constexpr u32 KV_PREFILL_FEW_BLOCKS = 128;  // work items of a sequence up to which they are split then

// Parameters of `plan_prefill`. `items` are the KvWorkItem of one kv head, which all heads share:
// `head` is 0, `tile_begin` and `tile_end` are tiles of the sequence, and the partial results of
// head h begin at partial * kv_heads + h * num_splits. `starts` is their number. Entries with more
// than q_len_max queries are planned.
struct KvPrefillPlanParams {
  KvDecodePlanParams batch;
  u32 rows, pad;  // query rows of a query tile
};

// Parameters of the kernels `prefill_*`. Here partial_rows is f32 [partial results][(head_dim + 8) *
// rows] (prefill_split.h), and counters u32 [partial results]; partial_stats and partial_index are
// unused.
struct KvPrefillParams {
  KvAttendParams attend;
  u64 items, count;  // from `plan_prefill`
};

KV_DEV u32 kv_prefill_up(u32 n, u32 step) { return n / step + (n % step > 0 ? 1 : 0); }

// Tiles in which a query tile sees a key: `sink_tiles` from tile 0 on, the others from tile `first`
// on.
struct KvPrefillTiles {
  u32 sink_tiles, first, tiles;
  // Returns the tile of the sequence that is the `nth` of these.
  KV_DEV u32 at(u32 nth) const { return nth < sink_tiles ? nth : nth - sink_tiles + first; }
};
template <class Params>
KV_DEV KvPrefillTiles kv_prefill_tiles(const Params& p, const KvSequence& sequence, u32 row, u32 rows) {
  const u32 all = sequence.q_len * p.group, left = all - row;
  const KvVisible lowest = kv_visible(p, sequence, row / p.group);
  const KvVisible highest = kv_visible(p, sequence, (row + (left < rows ? left : rows) - 1) / p.group);
  const KvReach reach = kv_reach(lowest, highest, 0, sequence.kv_len);
  const u32 first = reach.begin / KV_PREFILL_TILE, sinks = kv_prefill_up(reach.sink_end, KV_PREFILL_TILE);
  const u32 sink_tiles = sinks < first ? sinks : first;
  const u32 others = reach.end > reach.begin ? kv_prefill_up(reach.end, KV_PREFILL_TILE) - first : 0;
  return {sink_tiles, first, sink_tiles + others};
}
