// nvrtc: --fmad=false
// Conversions of a batch of rows (kv-cpu's convert.rs). convert_rows copies them to other axes or
// another element type; store_q8_0 encodes them and load_q8_0 decodes them. Needs `--fmad=false`, to
// round like the host.
//
//   kernel         blocks (any number is correct)             threads  shared bytes
//   convert_rows   [total / 4] rounded up                     128      0
//   store_q8_0     [total * heads * ceil(dim / 128) / 4] up   128      0
//   load_q8_0      [total * heads * ceil(dim / 256) / 4] up   128      0
//
// A warp converts all heads of a token, encodes up to 128 values of a row, or decodes up to 256. Rows
// of a tensor that belong to no entry are filled by pad_rows.
#include "convert.h"
#include "encode.h"
#include "format.h"

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

// Values of a row that a warp encodes, and that it decodes.
constexpr u32 KV_STORE_RUN = 128, KV_LOAD_RUN = 256;

// A part of one head's row.
struct KvStoredRun {
  u8 *plain, *stored;  // the row in the tensor, and its blocks
  u32 begin;           // first value of the part
};

KV_DEV KvStoredRun kv_stored_run(const KvStoredParams& p, u64 item, u32 run, u32 runs) {
  const KvEntry* entries = (const KvEntry*)p.entries;
  const u64 index = item / runs;
  const u32 row = (u32)(index / p.rows.heads), head = (u32)(index % p.rows.heads);
  const u32 entry = kv_entry_of(p.num_entries, row, [=](u32 i) { return entries[i].start; });
  const u32 start = entries[entry].start;
  u8* plain = kv_head_row(p.rows, entry, start, row - start, head);
  u8* stored = (u8*)p.stored + index * ((p.rows.dim + 31) / 32 * 34);
  return {plain, stored, (u32)(item % runs) * run};
}

KV_KERNEL(store_q8_0, KvStoredParams, 128, 1, [](const KvStoredParams& p) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = p.rows.dim;
  const u32 runs = (dim + KV_STORE_RUN - 1) / KV_STORE_RUN;
  const u64 items = (u64)p.total * p.rows.heads * runs;
  for (u64 item = (u64)blockIdx.x * KV_CONVERT_WARPS + warp; item < items; item += (u64)gridDim.x * KV_CONVERT_WARPS) {
    const KvStoredRun run = kv_stored_run(p, item, KV_STORE_RUN, runs);
    // All loads in flight before the first block.
    float values[KV_STORE_RUN / 32];
#pragma unroll
    for (u32 i = 0; i < KV_STORE_RUN / 32; i++) {
      const u32 at = run.begin + 32 * i + lane;
      values[i] = at < dim ? kv_load(p.rows.dtype, run.plain, at) : 0.f;
    }
#pragma unroll
    for (u32 i = 0; i < KV_STORE_RUN / 32; i++) {
      const u32 begin = run.begin + 32 * i;
      if (begin < dim) kv_encode_q8_0(values[i], run.stored + begin / 32 * 34, lane);
    }
  }
})

KV_KERNEL(load_q8_0, KvStoredParams, 128, 1, [](const KvStoredParams& p) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = p.rows.dim;
  const u32 runs = (dim + KV_LOAD_RUN - 1) / KV_LOAD_RUN;
  const u64 items = (u64)p.total * p.rows.heads * runs;
  for (u64 item = (u64)blockIdx.x * KV_CONVERT_WARPS + warp; item < items; item += (u64)gridDim.x * KV_CONVERT_WARPS) {
    const KvStoredRun run = kv_stored_run(p, item, KV_LOAD_RUN, runs);
    const u32 begin = run.begin + 8 * lane;
    if (begin >= dim) continue;
    float values[8];
    kv_values<8>(KV_FMT_Q8_0, run.stored, 0, dim, 1.f, begin, values);
    u8* to = run.plain + (u64)begin * kv_dtype_bytes(p.rows.dtype);
    if (begin + 8 <= dim && ((u64)to & 15) == 0) {
      kv_store8(p.rows.dtype, to, values);
      continue;
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++)
      if (begin + i < dim) kv_store(p.rows.dtype, run.plain, begin + i, values[i]);
  }
})
