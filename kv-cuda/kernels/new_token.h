// The slots of new tokens.
#pragma once
#include "rows.h"

// A new token of the step and its slot.
struct KvNew {
  u32 entry, start, token;  // entry of the batch, its first ragged row, index of the token in it
  u32 block;
  KvPlace place;
};

KV_DEV KvNew kv_new_token(const KvPlan& plan, u32 sequences, const KvPlane& p, u32 row) {
  const KvSequence* list = (const KvSequence*)plan.sequences;
  const u32 entry = kv_entry_of(sequences, row, [=](u32 i) { return list[i].new_start; });
  const KvSequence& s = list[entry];
  const u32 token = row - s.new_start, slot = ((const u32*)plan.slots)[row];
  // The plan's slots give the place; the position tells whether the row is kept in 16 bits.
  const bool wide = s.kv_len - s.new_len + token < p.full_precision_prefix;
  return {entry, s.new_start, token, slot / p.block_size, {0, slot % p.block_size, wide}};
}
