// The rows of an output that belong to no query: a tensor may have room for more queries than the
// batch has, and a replayed launch serves batches of any size. Part of decode.h.
#pragma once

// Fills such rows of one tensor with `words` words. The warps of the grid take rows of a ragged
// tensor in turn, else entries of the batch.
KV_DEV void kv_decode_fill_rows(const KvAttendParams& a, const KvTensor& to, u32 words, u32 word) {
  const KvCounts& counts = *(const KvCounts*)a.plan.counts;
  if (counts.total_q >= (u64)to.batch * to.tokens) return;  // no entry has more queries than fit
  const u32 warps = blockDim.x / 32, nth = blockIdx.x * warps + threadIdx.x / 32, all = gridDim.x * warps;
  const bool is_ragged = to.axes == KV_THD;
#pragma unroll 1
  for (u32 entry = is_ragged ? 0 : nth; entry < to.batch; entry += is_ragged ? to.batch : all) {
    u32 token = 0;  // the first that belongs to no query
    if (is_ragged) token = counts.total_q + nth;
    else if (entry < counts.sequences) token = ((const KvSequence*)a.plan.sequences)[entry].q_len;
#pragma unroll 1
    for (; token < to.tokens; token += is_ragged ? all : 1) {
      u32* const row = (u32*)kv_token(to, entry, 0, token);
#pragma unroll 1
      for (u32 i = threadIdx.x % 32; i < words; i += 32) row[i] = word;
    }
  }
}

KV_DEV void kv_decode_fill(const KvAttendParams& a) {
  kv_decode_fill_rows(a, a.out, a.out.heads * a.out.dim / 2, 0);
  if (a.lse.data != 0) kv_decode_fill_rows(a, a.lse, a.lse.heads, kv_as_u(kv_minus_inf()));
}
