// Rotation of rows in shared memory by all threads of a block: kv-quant's transform.
#pragma once
#include "rows.h"

// What the rotation of `1 << log2` values multiplies with, rounded as kv-quant's `norm`.
KV_DEV float kv_norm(u32 log2) {
  float scale = 1.f;
  for (u32 i = 0; i < log2 / 2; i++) scale *= 0.5f;
  return log2 % 2 == 1 ? scale * 0.707106781186547524f : scale;
}

// The block of the rotation that value `at` of `dim` lies in: its first value and log2 of its length.
// Blocks are the binary digits of `dim`, largest first.
struct KvRotation { u32 begin, log2; };
KV_DEV KvRotation kv_rotation(u32 dim, u32 at, u32 top) {
  KvRotation block = {0, top};
  for (; block.log2 > 0; block.log2--) {
    const u32 length = 1u << block.log2;
    if ((dim & length) == 0) continue;
    if (at < block.begin + length) break;
    block.begin += length;
  }
  return block;
}

// Rotates `count` rows of `dim` values, `stride` floats apart. All threads of the block call it; each
// sees the rows as all left them when it returns, and must when it calls.
KV_DEV void kv_rotate_rows(float* rows, u32 count, u32 stride, u32 dim, u32 thread, u32 threads) {
  u32 top = 0;
  while (dim >> (top + 1) != 0) top++;
  for (u32 step = 0; step <= top; step++) {
    const u32 h = 1u << step;
    for (u32 i = thread; i < count * dim; i += threads) {
      const u32 at = i % dim;
      const KvRotation block = kv_rotation(dim, at, top);
      float* value = rows + i / dim * stride + at;
      if (step == top) {
        *value *= kv_norm(block.log2);
      } else if (step < block.log2 && ((at - block.begin) & h) == 0) {
        const float a = value[0], b = value[h];
        value[0] = a + b;
        value[h] = a - b;
      }
    }
    kv_sync();
  }
}
