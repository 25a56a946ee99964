// Addresses of rows: kv-core's TokenRows, SlotMap and PlaneLayout, on the device.
#pragma once
#include "params.h"

struct KvPlace {
  u32 index;   // in the sequence's block table
  u32 inside;  // first slot inside the block
  bool wide;   // kept in 16 bits among codes
};

// Places the `nth` of consecutive rows in 16 bits.
KV_DEV KvPlace kv_place_wide(const KvPlane& p, u32 nth) {
  return {nth / p.wide_per_block, nth % p.wide_per_block * p.wide_slots, true};
}

// Returns the slots of the full-precision prefix, including the gaps between its rows.
KV_DEV u32 kv_prefix_slots(const KvPlane& p) {
  if (p.full_precision_prefix == 0) return 0;
  const KvPlace last = kv_place_wide(p, p.full_precision_prefix - 1);
  return last.index * p.block_size + last.inside + p.wide_slots;
}

// SlotMap::place: places a token of the full-precision prefix or of the codes.
KV_DEV KvPlace kv_place(const KvPlane& p, u32 position) {
  if (position < p.full_precision_prefix) return kv_place_wide(p, position);
  const u32 slot = kv_prefix_slots(p) + (position - p.full_precision_prefix);
  return {slot / p.block_size, slot % p.block_size, false};
}

// SlotMap::blocks: the blocks that `tokens` tokens without a tail need.
KV_DEV u32 kv_blocks(const KvPlane& p, u32 tokens) {
  u32 slots = tokens;
  if (p.full_precision_prefix > 0 && tokens > 0) {
    const u32 wide = tokens < p.full_precision_prefix ? tokens : p.full_precision_prefix;
    const KvPlace last = kv_place_wide(p, wide - 1);
    slots = last.index * p.block_size + last.inside + p.wide_slots + (tokens - wide);
  }
  return slots / p.block_size + (slots % p.block_size > 0 ? 1 : 0);
}

// SlotMap::place_in: places a token of a sequence whose first `coded` tokens are codes.
KV_DEV KvPlace kv_place_in(const KvPlane& p, u32 position, u32 coded) {
  const u32 begin = coded > p.full_precision_prefix ? coded : p.full_precision_prefix;
  if (!p.has_tail || position < begin) return kv_place(p, position);
  KvPlace place = kv_place_wide(p, position - begin);
  place.index += kv_blocks(p, begin);
  return place;
}

// SlotMap::place_sealed: places a token of the previous tail, which the open step encodes.
KV_DEV KvPlace kv_place_sealed(const KvPlane& p, u32 position, const KvSequence& s) {
  const u32 begin = s.coded_before > p.full_precision_prefix ? s.coded_before : p.full_precision_prefix;
  KvPlace place = kv_place_wide(p, position - begin);
  place.index += s.sealed_index;
  return place;
}

// SlotMap::tokens: the tokens that fit `blocks` blocks without a tail.
KV_DEV u32 kv_tokens(const KvPlane& p, u32 blocks) {
  const u32 slots = blocks * p.block_size, prefix = kv_prefix_slots(p);
  if (p.full_precision_prefix == 0) return slots;
  if (slots >= prefix) return p.full_precision_prefix + (slots - prefix);
  const u32 fit = p.wide_per_block * blocks;
  return fit < p.full_precision_prefix ? fit : p.full_precision_prefix;
}

// SlotMap::tail_begin: the first position in the tail; `len` without one.
KV_DEV u32 kv_tail_begin(const KvPlane& p, u32 len, u32 coded) {
  const u32 begin = coded > p.full_precision_prefix ? coded : p.full_precision_prefix;
  return p.has_tail && begin < len ? begin : len;
}

// Returns the address of a block.
KV_DEV u8* kv_block(const KvPlane& p, u32 block) {
  u64 base = p.base;
  if (p.segments != 0) {
    base = ((const u64*)p.segments)[block / p.blocks_per_segment];
    block %= p.blocks_per_segment;
  }
  return (u8*)(base + (u64)block * p.block_bytes);
}

// PlaneLayout::row_begin: the offset of head `head`'s row in its block.
KV_DEV u64 kv_row_begin(const KvPlane& p, const KvPlace& place, u32 head) {
  return (u64)place.inside * p.token_stride + (u64)head * (place.wide ? p.wide_head_stride : p.head_stride);
}

// The constants of one head: kv-core's HeadConstants.
struct KvConstants {
  float scale, inv_scale;
  const float *mean, *into, *back;
};
KV_DEV KvConstants kv_constants(const KvPlane& p, u32 head) {
  if (p.constants == 0) return {1.f, 1.f, nullptr, nullptr, nullptr};
  const float* list = (const float*)p.constants;
  const u32 heads = p.num_kv_heads, channels = heads * p.head_dim;
  const float* rows = list + 2 * heads + head * p.head_dim;
  return {list[head], list[heads + head], rows, rows + channels, rows + 2 * channels};
}

KV_DEV u32 kv_dtype_bytes(u32 dtype) { return dtype == KV_F32 ? 4 : 2; }

// Returns the row of head 0 of token `i` of entry `entry`, which begins at ragged row `start`.
KV_DEV u8* kv_token(const KvTensor& t, u32 entry, u32 start, u32 i) {
  if (t.axes == KV_THD) return (u8*)(t.data + ((u64)start + i) * t.token_stride);
  return (u8*)(t.data + (u64)entry * t.batch_stride + (u64)i * t.token_stride);
}

// Returns the row of one head of that token.
KV_DEV u8* kv_head_row(const KvTensor& t, u32 entry, u32 start, u32 i, u32 head) {
  return kv_token(t, entry, start, i) + (u64)head * t.dim * kv_dtype_bytes(t.dtype);
}

// Loads and stores value `i` of an unquantised row.
KV_DEV float kv_load(u32 dtype, const u8* row, u32 i) {
  if (dtype == KV_F32) return ((const float*)row)[i];
  const u16 x = ((const u16*)row)[i];
  return dtype == KV_F16 ? kv_f16_f(x) : kv_bf16_f(x);
}
KV_DEV void kv_store(u32 dtype, u8* row, u32 i, float value) {
  if (dtype == KV_F32) ((float*)row)[i] = value;
  else ((u16*)row)[i] = (u16)(dtype == KV_F16 ? kv_pack(KvF16(), value, 0.f) : kv_pack(KvBf16(), value, 0.f));
}

// Finds the entry of ragged row `row`: the last one that begins at or before it. Starts never
// decrease; of several entries with the same start, only the last has rows.
template <class Start> KV_DEV u32 kv_entry_of(u32 entries, u32 row, Start start) {
  u32 low = 0, high = entries;
  while (high - low > 1) {
    const u32 middle = low + (high - low) / 2;
    if (start(middle) <= row) low = middle; else high = middle;
  }
  return low;
}
