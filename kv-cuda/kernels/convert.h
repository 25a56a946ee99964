// Copies and conversions of unquantised rows by a team of threads: thread `thread` of `threads`.
#pragma once
#include "rows.h"

struct alignas(16) KvWords4 { u32 word[4]; };

// Copies an even number of bytes between even addresses: 16 at a time if the addresses are equal
// modulo 16, otherwise 4 or 2.
KV_DEV void kv_copy_bytes(u8* to, const u8* from, u64 bytes, u32 thread, u32 threads) {
  const u64 differing_bits = (u64)to ^ (u64)from;
  if ((differing_bits & 3) != 0) {
    for (u64 i = (u64)thread * 2; i < bytes; i += (u64)threads * 2) *(u16*)(to + i) = *(const u16*)(from + i);
    return;
  }
  const u64 unit = (differing_bits & 15) == 0 ? 16 : 4;
  const u64 before = (0 - (u64)to) & (unit - 1), head = before < bytes ? before : bytes;
  const u64 end = head + (bytes - head) / unit * unit;
  for (u64 i = (u64)thread * 2; i < head; i += (u64)threads * 2) *(u16*)(to + i) = *(const u16*)(from + i);
  if (unit == 16) {
    // Four loads in flight before the first store.
    const u64 stride = (u64)threads * 16;
    u64 i = head + (u64)thread * 16;
    for (; i + 3 * stride < end; i += 4 * stride) {
      KvWords4 words[4];
#pragma unroll
      for (u32 j = 0; j < 4; j++) words[j] = *(const KvWords4*)(from + i + j * stride);
#pragma unroll
      for (u32 j = 0; j < 4; j++) *(KvWords4*)(to + i + j * stride) = words[j];
    }
    for (; i < end; i += stride) *(KvWords4*)(to + i) = *(const KvWords4*)(from + i);
  } else {
    for (u64 i = head + (u64)thread * 4; i < end; i += (u64)threads * 4) *(u32*)(to + i) = *(const u32*)(from + i);
  }
  for (u64 i = end + (u64)thread * 2; i < bytes; i += (u64)threads * 2) *(u16*)(to + i) = *(const u16*)(from + i);
}

// Loads and stores eight values at a multiple of 16 bytes.
KV_DEV void kv_load8(u32 dtype, const u8* at, float (&values)[8]) {
  const KvWords4 first = *(const KvWords4*)at;
  if (dtype == KV_F32) {
    const KvWords4 second = *(const KvWords4*)(at + 16);
#pragma unroll
    for (u32 i = 0; i < 8; i++) values[i] = kv_as_f((i < 4 ? first : second).word[i % 4]);
    return;
  }
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    const u16 bits = (u16)(first.word[i / 2] >> (i % 2 * 16));
    values[i] = dtype == KV_F16 ? kv_f16_f(bits) : kv_bf16_f(bits);
  }
}
KV_DEV void kv_store8(u32 dtype, u8* at, const float (&values)[8]) {
  if (dtype == KV_F32) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      KvWords4 words;
#pragma unroll
      for (u32 i = 0; i < 4; i++) words.word[i] = kv_as_u(values[4 * half + i]);
      *(KvWords4*)(at + 16 * half) = words;
    }
    return;
  }
  KvWords4 words;
#pragma unroll
  for (u32 i = 0; i < 4; i++)
    words.word[i] = dtype == KV_F16 ? kv_pack(KvF16(), values[2 * i], values[2 * i + 1])
                                    : kv_pack(KvBf16(), values[2 * i], values[2 * i + 1]);
  *(KvWords4*)at = words;
}

// Converts one value; copies its bits if the types are equal.
KV_DEV void kv_convert1(u32 from_dtype, const u8* from, u32 to_dtype, u8* to) {
  if (from_dtype != to_dtype) kv_store(to_dtype, to, 0, kv_load(from_dtype, from, 0));
  else if (to_dtype == KV_F32) *(u32*)to = *(const u32*)from;
  else *(u16*)to = *(const u16*)from;
}

// Converts eight values, both at multiples of 16 bytes.
KV_DEV void kv_convert8(u32 from_dtype, const u8* from, u32 to_dtype, u8* to) {
  if (from_dtype == to_dtype) {
    *(KvWords4*)to = *(const KvWords4*)from;
    if (to_dtype == KV_F32) *(KvWords4*)(to + 16) = *(const KvWords4*)(from + 16);
    return;
  }
  float values[8];
  kv_load8(from_dtype, from, values);
  kv_store8(to_dtype, to, values);
}

// Converts `heads` rows of `dim` values, contiguous in `from` and `to_stride` bytes apart in `to`.
KV_DEV void kv_convert_heads(u32 from_dtype, const u8* from, u32 to_dtype, u8* to, u64 to_stride, u32 heads,
                             u32 dim, u32 thread, u32 threads) {
  const u32 from_bytes = kv_dtype_bytes(from_dtype), to_bytes = kv_dtype_bytes(to_dtype);
  const bool together = to_stride == (u64)dim * to_bytes;
  const u32 rows = together ? 1 : heads, values = together ? heads * dim : dim;
  const u64 places = (u64)from | (u64)to | (rows > 1 ? to_stride : 0);
  if ((places & 15) != 0 || values % 8 != 0) {
    for (u32 i = thread; i < rows * values; i += threads) {
      const u32 row = i / values, at = i % values;
      kv_convert1(from_dtype, from + (u64)i * from_bytes, to_dtype, to + row * to_stride + (u64)at * to_bytes);
    }
    return;
  }
  const u32 runs = values / 8;
  for (u32 i = thread; i < rows * runs; i += threads) {
    const u32 row = rows > 1 ? i / runs : 0, at = i - row * runs;
    u8* place = to + row * to_stride + (u64)at * 8 * to_bytes;
    kv_convert8(from_dtype, from + (u64)i * 8 * from_bytes, to_dtype, place);
  }
}

// Loads a row into f32 values that the team shares, and stores such values.
KV_DEV void kv_load_row(u32 dtype, const u8* from, float* x, u32 dim, u32 thread, u32 threads) {
  if (dtype != KV_F32 && dim % 2 == 0 && ((u64)from & 3) == 0) {
    for (u32 i = thread; i < dim / 2; i += threads) {
      const u32 pair = ((const u32*)from)[i];
      x[2 * i] = dtype == KV_F16 ? kv_f16_f((u16)pair) : kv_bf16_f((u16)pair);
      x[2 * i + 1] = dtype == KV_F16 ? kv_f16_f((u16)(pair >> 16)) : kv_bf16_f((u16)(pair >> 16));
    }
    return;
  }
  for (u32 i = thread; i < dim; i += threads) x[i] = kv_load(dtype, from, i);
}
KV_DEV void kv_store_row(u32 dtype, u8* to, const float* x, u32 dim, u32 thread, u32 threads) {
  if (dtype != KV_F32 && dim % 2 == 0 && ((u64)to & 3) == 0) {
    for (u32 i = thread; i < dim / 2; i += threads)
      ((u32*)to)[i] = dtype == KV_F16 ? kv_pack(KvF16(), x[2 * i], x[2 * i + 1])
                                      : kv_pack(KvBf16(), x[2 * i], x[2 * i + 1]);
    return;
  }
  for (u32 i = thread; i < dim; i += threads) kv_store(dtype, to, i, x[i]);
}
