// Wrong kernels, each with one mistake that the emulator must report. `argument` selects it.
#include "../../dev.h"

struct KvMistakeParams { u64 in, out; u32 count, argument; };
enum KvMistake : u32 {
  KV_DIVERGENT_BARRIER, KV_MISSED_BARRIER, KV_DIVERGENT_SHUFFLE, KV_MISSED_SHUFFLE, KV_TWO_MASKS, KV_PAST_SHARED,
  KV_MISALIGNED_COPY, KV_MISALIGNED_MATRIX, KV_EARLY_READ, KV_EARLY_MATRIX, KV_EARLY_LOAD, KV_NO_COMMIT,
  KV_WRITE_IN_FLIGHT, KV_TWO_COPIES, KV_COPY_PAST_SHARED, KV_ENDS_UNCOMMITTED, KV_ENDS_UNWAITED, KV_NO_MISTAKE,
};

KV_DEV void kv_test_mistake(const KvMistakeParams& p) {
  KV_DYN_SMEM(shared);
  u32* out = (u32*)p.out;
  const u32 i = threadIdx.x;
  u32 v = i;
  switch (p.argument) {
    case KV_DIVERGENT_BARRIER:
      if (i < 32) kv_sync();
      else
        kv_sync();
      break;
    case KV_MISSED_BARRIER:
      if (i != 40) kv_sync();
      break;
    case KV_DIVERGENT_SHUFFLE:
      if (i % 2 == 0) v = kv_shfl_xor(v, 1);
      else
        v = kv_shfl_xor(v, 1);
      break;
    case KV_MISSED_SHUFFLE:
      if (i != 5) v = kv_shfl_xor(v, 1);
      break;
    case KV_TWO_MASKS:
      v = kv_shfl_xor(v, i < 16 ? 1 : 2);
      break;
    case KV_PAST_SHARED:
      shared[p.count + i / 63] = 1;  // the last thread is one too far
      break;
    case KV_MISALIGNED_COPY:
      kv_cp_async16(shared + 8, (const u8*)p.in, true);
      break;
    case KV_MISALIGNED_MATRIX: {
      u32 r[4];
      kv_ldsm4(r, shared + 4 * i);
      v = r[0];
      break;
    }
    case KV_EARLY_READ:
      kv_cp_async16(shared + 16 * i, (const u8*)p.in, true);
      kv_cp_commit();
      kv_cp_wait<1>();  // one too many may be on its way
      v = ((const u32*)shared)[4 * i];
      kv_cp_wait<0>();
      break;
    case KV_EARLY_MATRIX: {
      kv_cp_async16(shared + 16 * i, (const u8*)p.in, true);
      kv_cp_commit();
      kv_syncwarp();  // orders the issue of the copies, not their end
      u32 r[4];
      kv_ldsm4(r, shared + 16 * (i ^ 1));
      v = r[0];
      kv_cp_wait<0>();
      break;
    }
    case KV_EARLY_LOAD:
      kv_cp_async16(shared + 16 * i, (const u8*)p.in, true);
      kv_cp_commit();
      kv_lds_at(kv_smem_addr(shared + 16 * i), v);
      kv_cp_wait<0>();
      break;
    case KV_NO_COMMIT:
      kv_cp_async16(shared + 16 * i, (const u8*)p.in, true);
      kv_cp_wait<0>();  // waits for groups, and the copy is in none
      ((u32*)shared)[4 * i] = 0;
      kv_sync();
      v = ((const u32*)shared)[4 * i];
      kv_cp_commit();
      kv_cp_wait<0>();
      break;
    case KV_WRITE_IN_FLIGHT:
      kv_cp_async16(shared + 16 * i, (const u8*)p.in, true);
      kv_cp_commit();
      kv_sync();
      ((u32*)shared)[4 * (i ^ 32)] = i;  // another warp's
      kv_cp_wait<0>();
      kv_sync();
      v = ((const u32*)shared)[4 * i];
      break;
    case KV_TWO_COPIES:
      kv_cp_async16(shared + 16 * (i / 2), (const u8*)p.in, true);
      kv_cp_commit();
      kv_syncwarp();
      kv_cp_wait<0>();
      break;
    case KV_COPY_PAST_SHARED:
      kv_cp_async16(shared + (p.count + 1) / 64 * (i + 1), (const u8*)p.in, true);  // the last thread's
      kv_cp_commit();
      kv_cp_wait<0>();
      break;
    case KV_ENDS_UNCOMMITTED:
      if (i == 7) kv_cp_async16(shared, (const u8*)p.in, true);
      kv_cp_commit();  // before another copy
      if (i == 7) kv_cp_async16(shared + 16, (const u8*)p.in, true);
      kv_cp_wait<0>();
      break;
    case KV_ENDS_UNWAITED:
      if (i == 7) kv_cp_async16(shared, (const u8*)p.in, true);
      kv_cp_commit();
      kv_sync();
      break;
    default:
      break;
  }
  out[i] = v;
}
KV_KERNEL(test_mistake, KvMistakeParams, 64, 1, kv_test_mistake)

// Reads the bytes of a copy before every one of `count` barriers, and after its wait, and notes for
// each thread how often they had not arrived. The copy is committed first or, with `argument` 1,
// last, so that the wait before the barriers does not cover it.
KV_DEV void kv_test_arrival(const KvMistakeParams& p) {
  KV_DYN_SMEM(shared);
  const u32 i = threadIdx.x, expected = *(const u32*)p.in;
  const volatile u32* own = (const volatile u32*)(shared + 16 * i);
  u32 early = 0;
  kv_cp_async16(shared + 16 * i, (const u8*)p.in, true);
  if (p.argument == 0) kv_cp_commit();
  else
    kv_cp_wait<0>();
  for (u32 turn = 0; turn < p.count; turn++) {
    early += *own != expected;
    kv_sync();
  }
  if (p.argument != 0) kv_cp_commit();
  kv_cp_wait<0>();
  ((u32*)p.out)[i] = *own == expected ? early : 0xffffffffu;
}
KV_KERNEL(test_arrival, KvMistakeParams, 64, 1, kv_test_arrival)

// Adds `count` to what it reads. It is registered without KV_KERNEL, whose wait comes first: with
// some values of `argument` this one waits too late or never.
enum KvDependent : u32 { KV_WAITS, KV_READS_EARLY, KV_WRITES_EARLY, KV_NEVER_WAITS };

KV_DEV void kv_test_dependent(const KvMistakeParams& p) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  u32 *in = (u32*)p.in, *out = (u32*)p.out, v = 0;
  if (p.argument == KV_READS_EARLY) v = in[i];
  if (p.argument == KV_WRITES_EARLY) out[i] = 0;
  if (p.argument != KV_NEVER_WAITS) kv_grid_wait();
  if (p.argument != KV_READS_EARLY) v = in[i];
  out[i] = v + p.count;
}
static const kvemu::Kernel kv_kernel_test_dependent{
    "test_dependent", sizeof(KvMistakeParams), 64,
    [](const void* params) { kv_test_dependent(*static_cast<const KvMistakeParams*>(params)); }};
