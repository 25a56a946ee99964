// convert_rows: copies a batch of rows to other axes or another element type (kv-cpu's convert.rs).
//
//   kernel         blocks (any number is correct)   threads  shared bytes
//   convert_rows   [total / 4] rounded up           128      0
//
// A warp converts all heads of a token. Rows of `dst` that belong to no entry are filled by
// pad_rows.
#include "convert.h"

constexpr u32 KV_CONVERT_WARPS = 4;

KV_KERNEL(convert_rows, KvConvertParams, 128, 1, [](const KvConvertParams& p) {
  const KvEntry* entries = (const KvEntry*)p.entries;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, values = p.src.heads * p.src.dim;
  const u64 together = (u64)values * kv_dtype_bytes(p.dst.dtype);
  for (u64 row = (u64)blockIdx.x * KV_CONVERT_WARPS + warp; row < p.total; row += (u64)gridDim.x * KV_CONVERT_WARPS) {
    const u32 entry = kv_entry_of(p.num_entries, (u32)row, [=](u32 i) { return entries[i].start; });
    const u32 start = entries[entry].start, token = (u32)row - start;
    const u8* from = kv_token(p.src, entry, start, token);
    u8* to = kv_token(p.dst, entry, start, token);
    kv_convert_heads(p.src.dtype, from, p.dst.dtype, to, together, 1, values, lane, 32);
  }
})
