// Where the rows of a token lie, whatever the plane keeps besides codes.
#pragma once
#include "rows.h"

// Where a token's rows of one kv head lie.
struct KvTokenAt { u64 k, v, mean; u32 wide, pad; };

// Looks up the rows of one token that a query sees.
KV_DEV KvTokenAt kv_find(const KvAttendParams& p, const KvSequence& sequence, u32 kv_head, u32 position) {
  const KvPlace place = kv_place_in(p.k_plane, position, sequence.coded);
  const u32 block = ((const u32*)p.plan.tables)[(u64)sequence.table + place.index];
  const u8* k = kv_block(p.k_plane, block);
  const u64 mean = (u64)k + p.k_plane.mean_begin + (u64)kv_head * p.k_plane.head_dim * 2;
  const u64 v = (u64)kv_block(p.v_plane, block) + kv_row_begin(p.v_plane, place, kv_head);
  const bool has_mean = p.k_plane.block_means != 0 && !place.wide;
  return {(u64)k + kv_row_begin(p.k_plane, place, kv_head), v, has_mean ? mean : 0, place.wide, 0};
}
