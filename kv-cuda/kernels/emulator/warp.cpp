// Barriers and warp collectives.
//
// A barrier and kv_syncwarp order memory; a shuffle, a vote and a matrix operation exchange
// registers without ordering memory.
#include "engine.h"
#include "sanitizer.h"

namespace kvemu {

static bool same(Site a, Site b) { return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0); }

void Engine::barrier(Site site) {
  advance_copies();
  if (barrier_.arrived == 0) barrier_.site = site;
  else if (!same(barrier_.site, site)) {
    fail("divergent barrier: it is in kv_sync at %s:%d, others are at %s:%d", site.file, site.line,
         barrier_.site.file, barrier_.site.line);
  }
  const u32 generation = barrier_.generation;
  char& token = barrier_.tokens[generation & 1];
  happened_before(token);
  if (++barrier_.arrived == threads_) {
    barrier_.arrived = 0;
    barrier_.generation++;
  } else {
    wait(Wait::Barrier, site, generation);
  }
  happened_after(token);
  advance_copies();
}

void Engine::collective(const Collective& what, Site site, const void* in, u32 in_bytes, void* out, u32 out_bytes) {
  advance_copies();
  const Thread& thread = current().thread;
  Warp& warp = warps_[thread.warp];
  if (warp.arrived == 0) {
    warp.what = what;
    warp.site = site;
  } else if (warp.what.combine != what.combine || warp.what.argument != what.argument || !same(warp.site, site)) {
    fail("divergent warp: it is in %s (%u) at %s:%d, other lanes are in %s (%u) at %s:%d", what.name, what.argument,
         site.file, site.line, warp.what.name, warp.what.argument, warp.site.file, warp.site.line);
  }
  const u32 generation = warp.generation, turn = generation & 1;
  copy_bytes(warp.in[turn][thread.lane], in, in_bytes);
  warp.arrived |= 1u << thread.lane;
  if (warp.arrived == 0xffffffffu) {
    if (what.combine != nullptr) what.combine(warp.in[turn], warp.out[turn], what.argument);
    warp.arrived = 0;
    warp.generation++;
  } else {
    wait(Wait::Warp, site, generation);
  }
  copy_bytes(out, warp.out[turn][thread.lane], out_bytes);
  advance_copies();
}

void Engine::sync_warp(Site site) {
  Warp& warp = warps_[current().thread.warp];
  char& token = warp.tokens[warp.generation & 1];
  happened_before(token);
  collective({"kv_syncwarp", 0, nullptr}, site, nullptr, 0, nullptr, 0);
  happened_after(token);
}

void barrier(Site site) { engine->barrier(site); }
void sync_warp(Site site) { engine->sync_warp(site); }
void collective(const Collective& what, Site site, const void* in, u32 in_bytes, void* out, u32 out_bytes) {
  engine->collective(what, site, in, in_bytes, out, out_bytes);
}

namespace {

typedef u8 In[LANE_IN];
typedef u8 Out[LANE_OUT];

template <class From> void shuffle(const In* in, Out* out, From from) {
  for (u32 lane = 0; lane < 32; lane++) copy_bytes(out[lane], in[from(lane)], 4);
}
void shuffle_any(const In* in, Out* out, u32) {
  shuffle(in, out, [&](u32 lane) {
    u32 from;
    copy_bytes(&from, in[lane] + 4, 4);
    return from & 31;
  });
}
void shuffle_down(const In* in, Out* out, u32 by) {
  shuffle(in, out, [&](u32 lane) { return lane + by < 32 ? lane + by : lane; });
}
void shuffle_xor(const In* in, Out* out, u32 mask) {
  shuffle(in, out, [&](u32 lane) { return (lane ^ mask) & 31; });
}
void ballot(const In* in, Out* out, u32) {
  u32 votes = 0;
  for (u32 lane = 0; lane < 32; lane++) votes |= u32(in[lane][0]) << lane;
  for (u32 lane = 0; lane < 32; lane++) copy_bytes(out[lane], &votes, 4);
}

u32 shuffled(const Collective& what, kvemu::Site site, u32 v) {
  u32 result;
  collective(what, site, &v, 4, &result, 4);
  return result;
}

}  // namespace
}  // namespace kvemu

// Each lane may read from a different lane, so the source lane is passed with the value.
u32 kv_shfl(u32 v, u32 lane, kvemu::Site site) {
  const u32 in[2] = {v, lane};
  u32 result;
  kvemu::collective({"kv_shfl", 0, kvemu::shuffle_any}, site, in, 8, &result, 4);
  return result;
}
u32 kv_shfl_down(u32 v, u32 by, kvemu::Site site) {
  return kvemu::shuffled({"kv_shfl_down", by, kvemu::shuffle_down}, site, v);
}
u32 kv_shfl_xor(u32 v, int mask, kvemu::Site site) {
  return kvemu::shuffled({"kv_shfl_xor", u32(mask), kvemu::shuffle_xor}, site, v);
}
u32 kv_ballot(bool v, kvemu::Site site) {
  return kvemu::shuffled({"kv_ballot", 0, kvemu::ballot}, site, v ? 1 : 0);
}
