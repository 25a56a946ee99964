// Wrong kernels, each with one mistake that the emulator must report. `argument` selects it.
#include "../../dev.h"

struct KvMistakeParams { u64 in, out; u32 count, argument; };
enum KvMistake : u32 {
  KV_DIVERGENT_BARRIER, KV_MISSED_BARRIER, KV_DIVERGENT_SHUFFLE, KV_MISSED_SHUFFLE, KV_TWO_MASKS, KV_PAST_SHARED,
  KV_MISALIGNED_COPY, KV_MISALIGNED_MATRIX, KV_EARLY_READ, KV_NO_MISTAKE,
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
      break;
    default:
      break;
  }
  out[i] = v;
}
KV_KERNEL(test_mistake, KvMistakeParams, 64, 1, kv_test_mistake)
