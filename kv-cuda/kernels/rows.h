// Where rows lie: kv-core's TokenRows, SlotMap and PlaneLayout, on the device.
#pragma once
#include "params.h"

struct KvPlace {
  u32 index;   // in the sequence's block table
  u32 inside;  // first slot inside the block
  bool wide;   // kept in 16 bits among codes
};

// The `nth` of wide rows one after another.
KV_DEV KvPlace kv_place_wide(const KvPlane& p, u32 nth) {
  return {nth / p.wide_per_block, nth % p.wide_per_block * p.wide_slots, true};
}

// Slots of the sinks, with the gaps between them.
KV_DEV u32 kv_sink_slots(const KvPlane& p) {
  if (p.sinks == 0) return 0;
  const KvPlace last = kv_place_wide(p, p.sinks - 1);
  return last.index * p.block_size + last.inside + p.wide_slots;
}

// SlotMap::place: a token that is a sink or a code.
KV_DEV KvPlace kv_place(const KvPlane& p, u32 position) {
  if (position < p.sinks) return kv_place_wide(p, position);
  const u32 slot = kv_sink_slots(p) + (position - p.sinks);
  return {slot / p.block_size, slot % p.block_size, false};
}

// SlotMap::blocks: blocks of `tokens` tokens without a tail.
KV_DEV u32 kv_blocks(const KvPlane& p, u32 tokens) {
  u32 slots = tokens;
  if (p.sinks > 0 && tokens > 0) {
    const u32 wide = tokens < p.sinks ? tokens : p.sinks;
    const KvPlace last = kv_place_wide(p, wide - 1);
    slots = last.index * p.block_size + last.inside + p.wide_slots + (tokens - wide);
  }
  return slots / p.block_size + (slots % p.block_size > 0 ? 1 : 0);
}

// SlotMap::place_in: a token of a sequence whose first `coded` tokens are codes.
KV_DEV KvPlace kv_place_in(const KvPlane& p, u32 position, u32 coded) {
  const u32 begin = coded > p.sinks ? coded : p.sinks;
  if (!p.has_tail || position < begin) return kv_place(p, position);
  KvPlace place = kv_place_wide(p, position - begin);
  place.index += kv_blocks(p, begin);
  return place;
}

// SlotMap::place_sealed: a token of the tail there was, in an open step that makes codes of it.
KV_DEV KvPlace kv_place_sealed(const KvPlane& p, u32 position, const KvSequence& s) {
  const u32 begin = s.coded_before > p.sinks ? s.coded_before : p.sinks;
  KvPlace place = kv_place_wide(p, position - begin);
  place.index += s.sealed_index;
  return place;
}

// SlotMap::tokens: tokens that fit `blocks` blocks without a tail.
KV_DEV u32 kv_tokens(const KvPlane& p, u32 blocks) {
  const u32 slots = blocks * p.block_size, sinks = kv_sink_slots(p);
  if (p.sinks == 0) return slots;
  if (slots >= sinks) return p.sinks + (slots - sinks);
  const u32 fit = p.wide_per_block * blocks;
  return fit < p.sinks ? fit : p.sinks;
}

// SlotMap::tail_begin: the first position in a tail, `len` where there is none.
KV_DEV u32 kv_tail_begin(const KvPlane& p, u32 len, u32 coded) {
  const u32 begin = coded > p.sinks ? coded : p.sinks;
  return p.has_tail && begin < len ? begin : len;
}

// First byte of a block.
KV_DEV u8* kv_block(const KvPlane& p, u32 block) {
  u64 base = p.base;
  if (p.segments != 0) {
    base = ((const u64*)p.segments)[block / p.blocks_per_segment];
    block %= p.blocks_per_segment;
  }
  return (u8*)(base + (u64)block * p.block_bytes);
}

// PlaneLayout::row_begin: bytes from a block's start to a row of head `head`.
KV_DEV u64 kv_row_begin(const KvPlane& p, const KvPlace& place, u32 head) {
  return (u64)place.inside * p.token_stride + (u64)head * (place.wide ? p.wide_head_stride : p.head_stride);
}

// Constants of one head: kv-core's HeadConstants.
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

// Token `i` of entry `entry`, whose tokens begin at row `start` of a ragged tensor; head 0.
KV_DEV u8* kv_token(const KvTensor& t, u32 entry, u32 start, u32 i) {
  if (t.axes == KV_THD) return (u8*)(t.data + ((u64)start + i) * t.token_stride);
  return (u8*)(t.data + (u64)entry * t.batch_stride + (u64)i * t.token_stride);
}

// Row of one head of that token.
KV_DEV u8* kv_head_row(const KvTensor& t, u32 entry, u32 start, u32 i, u32 head) {
  return kv_token(t, entry, start, i) + (u64)head * t.dim * kv_dtype_bytes(t.dtype);
}

// Value `i` of a row of plain numbers.
KV_DEV float kv_load(u32 dtype, const u8* row, u32 i) {
  if (dtype == KV_F32) return ((const float*)row)[i];
  const u16 x = ((const u16*)row)[i];
  return dtype == KV_F16 ? kv_f16_f(x) : kv_bf16_f(x);
}
KV_DEV void kv_store(u32 dtype, u8* row, u32 i, float value) {
  if (dtype == KV_F32) ((float*)row)[i] = value;
  else ((u16*)row)[i] = (u16)(dtype == KV_F16 ? kv_pack(KvF16(), value, 0.f) : kv_pack(KvBf16(), value, 0.f));
}

// The entry whose first row is the last at or before ragged row `row`. Starts never fall; of several
// entries that begin there, the last, which is the one that has rows.
template <class Start> KV_DEV u32 kv_entry_of(u32 entries, u32 row, Start start) {
  u32 low = 0, high = entries;
  while (high - low > 1) {
    const u32 middle = low + (high - low) / 2;
    if (start(middle) <= row) low = middle; else high = middle;
  }
  return low;
}
