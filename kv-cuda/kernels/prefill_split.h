// The split-K merge of prefill. A work item of a query tile that is split leaves its unnormalised
// sums, maxima and totals; the last one to finish among four neighbours merges theirs, then four
// such results, and so on, each time in the order of the splits. So the order of additions depends
// only on the number of splits, and no thread block reads many partial results one after another.
// Part of prefill.h.
//
// A thread merges what the same threads of other blocks stored, as they have it in registers: f32
// [partial result][M * (COLUMNS + 1)][128][4], with maxima and totals in the last M vectors. It
// merges in memory: with the sums in registers, few loads could be in flight.
#pragma once
#include "prefill_item.h"

constexpr u32 KV_PREFILL_MERGED = 4;  // partial results that are merged at a time

template <class Item> struct KvPrefillSplit {
  static constexpr u32 M = Item::M, COLUMNS = Item::COLUMNS, VECTORS = M * (COLUMNS + 1);
  // Vectors of each of those that are merged whose loads are in flight together.
  static constexpr u32 BATCH = 8;
  typedef float Sums[M][COLUMNS][4];
  typedef float Rows[M][2];

  const Item& item;
  u32 base;    // index of the query tile's first partial result
  u32 thread;

  KV_DEV float4* partial(u32 split) const {
    return (float4*)item.p.partial_rows + ((u64)(base + split) * VECTORS * KV_PREFILL_THREADS + thread);
  }
  KV_DEV void store(u32 split, const Sums& o, const Rows& most, const Rows& total) const {
    float4* const to = partial(split);
#pragma unroll
    for (u32 m = 0; m < M; m++) {
#pragma unroll
      for (u32 d = 0; d < COLUMNS; d++)
        to[(m * COLUMNS + d) * KV_PREFILL_THREADS] = make_float4(o[m][d][0], o[m][d][1], o[m][d][2], o[m][d][3]);
      to[(M * COLUMNS + m) * KV_PREFILL_THREADS] = make_float4(most[m][0], most[m][1], total[m][0], total[m][1]);
    }
  }
  KV_DEV void load(u32 split, Sums& o, Rows& most, Rows& total) const {
    const float4* const from = partial(split);
#pragma unroll
    for (u32 m = 0; m < M; m++) {
#pragma unroll
      for (u32 d = 0; d < COLUMNS; d++) {
        const float4 x = kv_ldcg(from + (m * COLUMNS + d) * KV_PREFILL_THREADS);
        o[m][d][0] = x.x, o[m][d][1] = x.y, o[m][d][2] = x.z, o[m][d][3] = x.w;
      }
      const float4 rows = kv_ldcg(from + (M * COLUMNS + m) * KV_PREFILL_THREADS);
      most[m][0] = rows.x, most[m][1] = rows.y, total[m][0] = rows.z, total[m][1] = rows.w;
    }
  }
  // Merges `count` partial results, of `first`, `first + step`, .., into the first of them.
  KV_DEV void combine(u32 first, u32 step, u32 count) const {
    const float lowest = kv_as_f(0xff7fffffu);
    float4* const to = partial(first);
    const u64 stride = (u64)step * VECTORS * KV_PREFILL_THREADS;
#pragma unroll 1
    for (u32 m = 0; m < M; m++) {
      float4 rows[KV_PREFILL_MERGED], merged = make_float4(lowest, lowest, 0.f, 0.f);
      float factors[KV_PREFILL_MERGED][2];
      float4* const own = to + (M * COLUMNS + m) * KV_PREFILL_THREADS;
#pragma unroll
      for (u32 i = 0; i < KV_PREFILL_MERGED; i++) {
        rows[i] = make_float4(lowest, lowest, 0.f, 0.f);
        if (i < count) rows[i] = kv_ldcg(own + i * stride);
        merged.x = kv_max(merged.x, rows[i].x), merged.y = kv_max(merged.y, rows[i].y);
      }
#pragma unroll
      for (u32 i = 0; i < KV_PREFILL_MERGED; i++) {
        factors[i][0] = kv_exp2(kv_sub_rn(rows[i].x, merged.x)), factors[i][1] = kv_exp2(kv_sub_rn(rows[i].y, merged.y));
        merged.z += rows[i].z * factors[i][0], merged.w += rows[i].w * factors[i][1];
      }
      *own = merged;
#pragma unroll 1
      for (u32 begin = 0; begin < COLUMNS; begin += BATCH) {
        float4* const own = to + (m * COLUMNS + begin) * KV_PREFILL_THREADS;
        float4 x[BATCH][KV_PREFILL_MERGED];
#pragma unroll
        for (u32 d = 0; d < BATCH; d++)
#pragma unroll
          for (u32 i = 0; i < KV_PREFILL_MERGED; i++) {
            x[d][i] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (i < count && begin + d < COLUMNS) x[d][i] = kv_ldcg(own + d * KV_PREFILL_THREADS + i * stride);
          }
#pragma unroll
        for (u32 d = 0; d < BATCH; d++) {
          float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
          for (u32 i = 0; i < KV_PREFILL_MERGED; i++) {
            sum.x += x[d][i].x * factors[i][0], sum.y += x[d][i].y * factors[i][0];
            sum.z += x[d][i].z * factors[i][1], sum.w += x[d][i].w * factors[i][1];
          }
          if (begin + d < COLUMNS) own[d * KV_PREFILL_THREADS] = sum;
        }
      }
    }
  }

  // Merges the sums of split `split` with those that other thread blocks leave. Returns whether this
  // one has the sums of the query tile.
  KV_DEV bool merge(u32 split, u32 num_splits, Sums& o, Rows& most, Rows& total) const {
    store(split, o, most, total);
#pragma unroll 1
    for (u32 step = 1; step < num_splits; step *= KV_PREFILL_MERGED) {
      const u32 first = split - split % (step * KV_PREFILL_MERGED), others = (num_splits - 1 - first) / step;
      const u32 count = others < KV_PREFILL_MERGED ? others + 1 : KV_PREFILL_MERGED;
      split = first;
      if (count == 1) continue;
      kv_fence();
      kv_sync();
      // The flags of tiles are free. No two groups of neighbours have the same counter.
      if (thread == 0)
        item.state.non_finite[0] = kv_atomic_inc((u32*)item.p.counters + base + first + step - 1, count - 1);
      kv_sync();
      if (item.state.non_finite[0] != count - 1) return false;
      kv_fence();
      combine(first, step, count);
    }
    load(0, o, most, total);
    return true;
  }
};
