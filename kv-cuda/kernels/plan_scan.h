// What the kernels that plan share: one thread block of KV_PLAN_THREADS threads, a scan over them,
// and the search for the owner of a place.
#pragma once
#include "dev.h"

constexpr u32 KV_PLAN_THREADS = 512, KV_PLAN_WARPS = KV_PLAN_THREADS / 32;

// Sums of the warps.
struct KvPlanScan { u64 sums[KV_PLAN_WARPS]; u32 counts[KV_PLAN_WARPS]; };

// Computes an inclusive scan over the threads, and the total. Two scans need a barrier between
// them.
struct KvPlanSum { u64 value; u32 count; };
KV_DEV KvPlanSum kv_plan_scan(KvPlanScan& s, KvPlanSum v, KvPlanSum& total) {
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

// Finds the first of KV_PLAN_THREADS running sums that exceeds `at`; there is one.
KV_DEV u32 kv_plan_find(const u32* ends, u32 at) {
  u32 owner = 0;
#pragma unroll 1
  for (u32 step = KV_PLAN_THREADS / 2; step > 0; step /= 2) {
    if (ends[owner + step - 1] <= at) owner += step;
  }
  return owner;
}
