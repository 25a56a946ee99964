// plan_prefill: computes the prefill schedule on the device (prefill_plan.h), so that every replay
// of a captured graph plans anew for the current KvCounts.
//
// Threads take one sequence each to count its query tiles, then one query tile each: first to find
// the length of splits, then to write the work items. In between, warps try one length each.
//
// The time that a length takes is estimated in tiles, from two bounds on list scheduling: work items
// of one size run in rounds of as many as there are slots; those of different sizes, the longest
// first, fill the slots up to about the shortest. A length is taken if it saves an eighth.
//
// Launch: 1 block, 512 threads, KV_PLAN_PREFILL_SHARED bytes of shared memory.
#include "plan_scan.h"
#include "prefill_plan.h"

// Query tiles of one head up to which a length is looked for; batches with more are not split.
constexpr u32 KV_PREFILL_TILES_MAX = 2048;

struct KvPlanPrefillShared {
  KvPlanScan scan;
  u32 query_tiles_end[KV_PLAN_THREADS];  // query tiles of the sequences up to this one
  u32 tiles[KV_PREFILL_TILES_MAX];       // of every query tile
  float costs[KV_PLAN_WARPS];            // of the best length of each warp
  u32 lengths[KV_PLAN_WARPS];
};
constexpr u32 KV_PLAN_PREFILL_SHARED = 10560;
static_assert(sizeof(KvPlanPrefillShared) == KV_PLAN_PREFILL_SHARED, "src/decode/plan.rs launches with this size");

// One query tile. All of a sequence with few of them may be split if splits are invariant.
struct KvPlanTile { u32 sequence, row; bool has_few; KvPrefillTiles tiles; };

struct KvPrefillPlanner {
  const KvPrefillPlanParams& p;
  KvPlanPrefillShared& s;
  const KvSequence* sequences;

  KV_DEV u32 query_tiles(u32 sequence) const {
    const u32 q_len = sequences[sequence].q_len;
    return q_len > p.batch.q_len_max ? kv_prefill_up(q_len * p.batch.group, p.rows) : 0;
  }
  // Calls `each(index, tile, exists)` with all threads for the query tiles of the batch, sequence by
  // sequence, and returns their number. Late queries see most keys, so they come first.
  template <class Each> KV_DEV u32 for_tiles(Each each) const {
    const u32 thread = threadIdx.x, count = ((const KvCounts*)p.batch.plan.counts)->sequences;
    u32 done = 0;
#pragma unroll 1
    for (u32 chunk = 0; chunk < count; chunk += KV_PLAN_THREADS) {
      KvPlanSum total;
      const u32 own = chunk + thread < count ? query_tiles(chunk + thread) : 0;
      const KvPlanSum ends = kv_plan_scan(s.scan, {0, own}, total);
      s.query_tiles_end[thread] = ends.count;
      kv_sync();
#pragma unroll 1
      for (u32 base = 0; base < total.count; base += KV_PLAN_THREADS) {
        const u32 nth = base + thread;
        KvPlanTile tile = {0, 0, false, {0, 0, 0}};
        if (nth < total.count) {
          const u32 owner = kv_plan_find(s.query_tiles_end, nth), end = s.query_tiles_end[owner];
          const u32 per_head = query_tiles(chunk + owner);
          tile.sequence = chunk + owner, tile.row = (end - 1 - nth) * p.rows;
          tile.has_few = per_head <= KV_PREFILL_FEW_BLOCKS / p.batch.kv_heads;
          tile.tiles = kv_prefill_tiles(p.batch, sequences[tile.sequence], tile.row, p.rows);
        }
        each(done + nth, tile, nth < total.count);
      }
      done += total.count;
      kv_sync();
    }
    return done;
  }
  KV_DEV static u32 num_splits(u32 tiles, u32 length) { return tiles > length ? kv_prefill_up(tiles, length) : 1; }

  // Estimates the time of a length with all lanes of a warp; infinite if it makes too many partial
  // results.
  KV_DEV float cost(u32 query_tiles, u32 length) const {
    const u32 heads = p.batch.kv_heads, slots = p.batch.slots;
    u32 items = 0, partials = 0, longest = 0, shortest = KV_NONE;
    float work = 0.f;
#pragma unroll 1
    for (u32 i = threadIdx.x % 32; i < query_tiles; i += 32) {
      const u32 tiles = s.tiles[i], splits = num_splits(tiles, length), part = tiles < length ? tiles : length;
      items += splits, partials += splits > 1 ? splits : 0;
      longest = part > longest ? part : longest, shortest = part < shortest ? part : shortest;
      work += (float)(tiles + splits * KV_PREFILL_OVERHEAD);
    }
    items = kv_warp_sum_u32(items) * heads, partials = kv_warp_sum_u32(partials) * heads;
    longest = kv_warp_max_u32(longest) + KV_PREFILL_OVERHEAD;
    shortest = ~kv_warp_max_u32(~shortest) + KV_PREFILL_OVERHEAD;
    if (partials > 2 * slots) return kv_infinity();
    const float rounds = (float)kv_prefill_up(items, slots) * (float)longest;
    const float filled = kv_warp_sum(work) * (float)heads / (float)slots + (float)shortest;
    return kv_max((float)longest, kv_min(rounds, filled));
  }

  // Returns the tiles of a split, KV_NONE if no context is split.
  KV_DEV u32 find_length() const {
    if (p.batch.invariant != 0) return KV_PREFILL_INVARIANT;
    u32 most = 0;
    const u32 query_tiles = for_tiles([&](u32 index, const KvPlanTile& tile, bool exists) {
      if (!exists || index >= KV_PREFILL_TILES_MAX) return;
      s.tiles[index] = tile.tiles.tiles;
      most = tile.tiles.tiles > most ? tile.tiles.tiles : most;
    });
    if (query_tiles == 0 || query_tiles > KV_PREFILL_TILES_MAX) return KV_NONE;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    most = kv_warp_max_u32(most);
    if (lane == 0) s.lengths[warp] = most;
    kv_sync();
#pragma unroll 1
    for (u32 i = 0; i < KV_PLAN_WARPS; i++) most = s.lengths[i] > most ? s.lengths[i] : most;
    kv_sync();
    // The longest context alone has a partial result for each of its splits.
    const u32 splits_max = 2 * p.batch.slots / p.batch.kv_heads;
    float best = cost(query_tiles, KV_NONE) * 0.875f;
    u32 length = KV_NONE;
#pragma unroll 1
    for (u32 splits = 2 + warp; splits <= splits_max; splits += KV_PLAN_WARPS) {
      const u32 tried = kv_prefill_up(most, splits);
      if (tried < KV_PREFILL_SPLIT_MIN) break;
      const float time = cost(query_tiles, tried);
      if (time < best) best = time, length = tried;
    }
    if (lane == 0) s.costs[warp] = best, s.lengths[warp] = length;
    kv_sync();
#pragma unroll 1
    for (u32 i = 0; i < KV_PLAN_WARPS; i++) {
      // Of equal costs the longest: fewer partial results.
      const bool is_better = s.costs[i] < best || (s.costs[i] == best && s.lengths[i] > length);
      if (s.lengths[i] != KV_NONE && (is_better || length == KV_NONE)) best = s.costs[i], length = s.lengths[i];
    }
    kv_sync();
    return length;
  }

  KV_DEV void run() const {
    const u32 length = find_length();
    u32 items = 0, partials = 0;
    for_tiles([&](u32, const KvPlanTile& tile, bool exists) {
      const bool may_split = exists && (p.batch.invariant == 0 || tile.has_few);
      const u32 splits = may_split ? num_splits(tile.tiles.tiles, length) : 1, own = exists ? splits : 0;
      const u32 own_partials = own > 1 ? own : 0;
      KvPlanSum total;
      const KvPlanSum ends = kv_plan_scan(s.scan, {own_partials, own}, total);
      const KvSequence& sequence = sequences[tile.sequence];
      const u32 end = kv_prefill_up(sequence.kv_len, KV_PREFILL_TILE);
      KvWorkItem* to = (KvWorkItem*)p.batch.items + items + ends.count - own;
      const u32 partial = own > 1 ? partials + (u32)ends.value - own_partials : 0;
#pragma unroll 1
      for (u32 i = 0; i < own; i++) {
        const u32 from = i == 0 ? 0 : tile.tiles.at(i * length);
        const u32 until = i + 1 == own ? end : tile.tiles.at((i + 1) * length);
        ((KvWord4*)to)[3 * i] = {tile.sequence, 0, tile.row, from};
        ((KvWord4*)to)[3 * i + 1] = {until, i, own, partial};
        ((KvWord4*)to)[3 * i + 2] = {sequence.kv_len, sequence.q_len, sequence.q_start, sequence.table};
      }
      items += total.count, partials += (u32)total.value;
      kv_sync();
    });
    if (threadIdx.x == 0) *(u32*)p.batch.starts = items;
  }
};

KV_DEV void kv_plan_prefill(const KvPrefillPlanParams& p) {
  KV_DYN_SMEM(shared);
  KvPrefillPlanner{p, *(KvPlanPrefillShared*)shared, (const KvSequence*)p.batch.plan.sequences}.run();
}

KV_KERNEL(plan_prefill, KvPrefillPlanParams, 512, 1, kv_plan_prefill)
