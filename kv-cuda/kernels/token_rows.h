// Addresses of a token's K and V rows, including rows in 16 bits, tails and block means.
#pragma once
#include "rows.h"

// The addresses of a token's rows of one kv head.
struct KvTokenRows { u64 k, v, mean; u32 wide, pad; };

// Looks up a token in the block table. The token must be visible to some query.
KV_DEV KvTokenRows kv_token_rows(const KvAttendParams& p, const KvSequence& sequence, u32 kv_head, u32 position) {
  const KvPlace place = kv_place_in(p.k_plane, position, sequence.coded);
  const u32 block = ((const u32*)p.plan.tables)[(u64)sequence.table + place.index];
  const u8* k = kv_block(p.k_plane, block);
  const u64 mean = (u64)k + p.k_plane.mean_begin + (u64)kv_head * p.k_plane.head_dim * 2;
  const u64 v = (u64)kv_block(p.v_plane, block) + kv_row_begin(p.v_plane, place, kv_head);
  const bool has_mean = p.k_plane.block_means != 0 && !place.wide;
  return {(u64)k + kv_row_begin(p.k_plane, place, kv_head), v, has_mean ? mean : 0, place.wide, 0};
}
