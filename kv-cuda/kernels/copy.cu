// copy_blocks: copies the first slots of blocks to other blocks, in every plane (kv-cpu's copy.rs).
//
//   kernel        blocks (any number is correct)                 threads  shared bytes
//   copy_blocks   [num_copies, num_planes, ceil(bytes / 16384)]  256      0
//
// where bytes is the block_bytes of the largest plane. No block is both read and written or written
// twice, so copies may run in any order.
#include "convert.h"

// Copies share `part` of `parts` of a run of bytes with all threads of a block.
KV_DEV void kv_copy_run(u8* to, const u8* from, u64 bytes, u32 part, u32 parts) {
  const u64 each = ((bytes + parts - 1) / parts + 15) / 16 * 16, begin = part * each;
  if (begin >= bytes) return;
  const u64 left = bytes - begin;
  kv_copy_bytes(to + begin, from + begin, left < each ? left : each, threadIdx.x, blockDim.x);
}

KV_DEV void kv_copy_block(const KvPlane& p, const KvBlockCopy& copy, u32 part, u32 parts) {
  const u8* from = kv_block(p, copy.from);
  u8* to = kv_block(p, copy.to);
  if (copy.slots >= p.block_size) return kv_copy_run(to, from, p.block_bytes, part, parts);
  // Tokens of one head, or of all heads, are contiguous.
  const u32 runs = p.token_stride == p.row_bytes ? p.num_kv_heads : 1;
  for (u32 run = 0; run < runs; run++) {
    const u64 begin = run * p.head_stride;
    kv_copy_run(to + begin, from + begin, copy.slots * p.token_stride, part, parts);
  }
  if (p.block_means) kv_copy_run(to + p.mean_begin, from + p.mean_begin, p.block_bytes - p.mean_begin, part, parts);
}

KV_KERNEL(copy_blocks, KvCopyParams, 256, 1, [](const KvCopyParams& p) {
  const KvPlane* planes = (const KvPlane*)p.planes;
  const KvBlockCopy* copies = (const KvBlockCopy*)p.copies;
  for (u32 plane = blockIdx.y; plane < p.num_planes; plane += gridDim.y)
    for (u32 copy = blockIdx.x; copy < p.num_copies; copy += gridDim.x)
      kv_copy_block(planes[plane], copies[copy], blockIdx.z, gridDim.z);
})
