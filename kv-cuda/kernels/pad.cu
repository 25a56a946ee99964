// pad_rows: fills the rows of an output that belong to no entry with one value.
//
//   kernel     blocks (any number is correct)                   threads  shared bytes
//   pad_rows   [batch * tokens / 4] rounded up, of the output   128      0
//
// A warp fills all heads of a token.
#include "convert.h"

constexpr u32 KV_PAD_WARPS = 4;

// Returns the number of rows of output entry `entry` that belong to the entry; they come first.
KV_DEV u32 kv_owned(const KvPadParams& p, u32 entry) {
  const KvCounts* counts = (const KvCounts*)p.counts;
  if (p.out.axes == KV_THD) return counts != nullptr ? counts->total_q : p.total;
  const u32 entries = counts != nullptr ? counts->sequences : p.num_entries;
  return entry < entries ? ((const KvEntry*)p.entries)[entry].len : 0;
}

KV_KERNEL(pad_rows, KvPadParams, 128, 1, [](const KvPadParams& p) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 values = p.out.heads * p.out.dim, bytes = kv_dtype_bytes(p.out.dtype);
  const u64 rows = (u64)p.out.batch * p.out.tokens;
  for (u64 row = (u64)blockIdx.x * KV_PAD_WARPS + warp; row < rows; row += (u64)gridDim.x * KV_PAD_WARPS) {
    const u32 entry = (u32)(row / p.out.tokens), token = (u32)(row % p.out.tokens);
    if (token < kv_owned(p, entry)) continue;
    u8* to = kv_token(p.out, entry, 0, token);
    // Single stores up to the first multiple of 16 bytes and after the last one.
    const u32 before = (u32)((0 - (u64)to) & 15) / bytes, head = before < values ? before : values;
    const u32 run = 16 / bytes, end = head + (values - head) / run * run;
    for (u32 i = lane; i < head; i += 32) kv_store(p.out.dtype, to, i, p.value);
    KvWords4 words;
    const u32 half = p.out.dtype == KV_F16 ? kv_pack(KvF16(), p.value, p.value) : kv_pack(KvBf16(), p.value, p.value);
    for (u32 i = 0; i < 4; i++) words.word[i] = p.out.dtype == KV_F32 ? kv_as_u(p.value) : half;
    for (u32 i = head + lane * run; i < end; i += 32 * run) *(KvWords4*)(to + (u64)i * bytes) = words;
    for (u32 i = end + lane; i < values; i += 32) kv_store(p.out.dtype, to, i, p.value);
  }
})
