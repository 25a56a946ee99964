// Every function of dev.h once, for the emulator's own tests; NVRTC compiles it too, so that both
// parts stay in step.
#include "../../dev.h"

struct KvTestParams { u64 in, out; u32 count, argument; };

// Returns the index of the thread in the grid.
KV_DEV u32 kv_test_index() { return blockIdx.x * blockDim.x + threadIdx.x; }

// Rows of 16 results, one row per thread: exchanges within warps.
KV_DEV void kv_test_warp(const KvTestParams& p) {
  const u32 i = kv_test_index(), v = ((const u32*)p.in)[i], lane = threadIdx.x & 31;
  u32* row = (u32*)p.out + 16 * i;
  row[0] = kv_shfl(v, 31 - lane);
  row[1] = kv_shfl_down(v, 3);
  row[2] = kv_shfl_xor(v, 5);
  row[3] = kv_ballot(v % 3 == 0);
  row[4] = kv_any(v == ((const u32*)p.in)[64 * blockIdx.x]);
  row[5] = kv_all(v < 1000);
  row[6] = kv_warp_sum_u32(v);
  row[7] = kv_warp_max_u32<8>(v);
  row[8] = kv_as_u(kv_warp_sum((float)v));
  row[9] = kv_as_u(kv_warp_max<4>(-(float)v));
  row[10] = kv_as_u(kv_shflf((float)v, 7));
  row[11] = kv_as_u(kv_shfl_downf((float)v, 16));
  row[12] = kv_movmatrix(v * 0x10001u + 0x8000u);
  row[13] = blockIdx.x;
  row[14] = gridDim.x;
  kv_syncwarp();
  row[15] = threadIdx.x;
}
KV_KERNEL(test_warp, KvTestParams, 64, 1, kv_test_warp)

// Rows of 24 results of one thread: arithmetic with a pair of numbers.
KV_DEV void kv_test_numbers(const KvTestParams& p) {
  const u32 i = kv_test_index();
  if (i >= p.count) return;
  const float a = kv_ldg((const float*)p.in + 2 * i), b = kv_ldcg((const float*)p.in + 2 * i + 1);
  float* row = (float*)p.out + 24 * i;
  row[0] = kv_max(a, b);
  row[1] = kv_min(a, b);
  row[2] = kv_exp(a);
  row[3] = kv_rint(a);
  row[4] = kv_floor(a);
  row[5] = kv_fma(a, b, a);
  row[6] = kv_add_rn(a, b);
  row[7] = kv_sub_rn(a, b);
  row[8] = kv_mul_rn(a, b);
  row[9] = kv_div_rn(a, b);
  row[10] = kv_sqrt(a * a);
  row[11] = (float)kv_float_to_int_rn(a);
  row[12] = kv_exp2(a);
  row[13] = kv_log2(a * a);
  row[14] = kv_rcp(b);
  const u32 half = kv_pack(KvF16(), a, b), bf16 = kv_pack(KvBf16(), a, b);
  row[15] = kv_f16_f((u16)half);
  row[16] = kv_f16_f((u16)(half >> 16));
  row[17] = kv_bf16_f((u16)bf16);
  row[18] = kv_bf16_f((u16)(bf16 >> 16));
  const u32 codes = kv_e4m3x2_f16x2(i & 0xffffu);
  row[19] = kv_f16_f((u16)codes);
  kv_stcs(row + 20, kv_f16_f((u16)(codes >> 16)));
  row[21] = (float)(kv_popc(kv_as_u(a)) * 64 + kv_clz(kv_as_u(b)));
  row[22] = kv_as_f(kv_prmt(kv_as_u(a), kv_as_u(b), 0x5140));
  row[23] = kv_ldcs((const float*)p.in + 2 * i);
}
KV_KERNEL(test_numbers, KvTestParams, 32, 1, kv_test_numbers)

// Counters: [0] threads, [1] the largest value, [2] wraps around 0..=argument, [3 + k] how often
// that was k.
KV_DEV void kv_test_atomics(const KvTestParams& p) {
  u32* counters = (u32*)p.out;
  kv_atomic_add(counters, 1);
  kv_atomic_max(counters + 1, ((const u32*)p.in)[kv_test_index()]);
  kv_atomic_add(counters + 3 + kv_atomic_inc(counters + 2, p.argument), 1);
}
KV_KERNEL(test_atomics, KvTestParams, 64, 1, kv_test_atomics)

// C [16][8] += A [16][16] B [8][16]; `argument` is 1 for bf16. B is transposed, as keys are; then A
// again, from memory where its two halves are transposed, as values are.
template <class T> KV_DEV void kv_test_multiply(const KvTestParams& p) {
  KV_DYN_SMEM(shared);
  const u32 lane = threadIdx.x, group = lane / 4, pair = lane % 4;
  const u8* in = (const u8*)p.in;
  // A: 16 rows of 32 bytes, followed by B: 8 rows.
  kv_cp_async16(shared + 16 * lane, in + 16 * lane, true);
  if (lane < 16) kv_cp_async16(shared + 512 + 16 * lane, in + 512 + 16 * lane, true);
  kv_cp_commit();
  kv_cp_wait<0>();
  kv_syncwarp();
  u32 a[4], b[4];
  // Matrices of 8 x 8: upper left, lower left, upper right, lower right.
  kv_ldsm4(a, shared + 32 * (lane % 16) + 16 * (lane / 16));
  kv_ldsm4(b, shared + 512 + 32 * (lane % 8) + 16 * (lane / 8 % 2));
  float* c = (float*)p.out;
  float sum[4] = {c[8 * group + 2 * pair], c[8 * group + 2 * pair + 1], c[8 * (group + 8) + 2 * pair],
                  c[8 * (group + 8) + 2 * pair + 1]};
  kv_mma(T(), sum, a, b[0], b[1]);
  c[8 * group + 2 * pair] = sum[0];
  c[8 * group + 2 * pair + 1] = sum[1];
  c[8 * (group + 8) + 2 * pair] = sum[2];
  c[8 * (group + 8) + 2 * pair + 1] = sum[3];
  u32 turned[4];
  kv_ldsm4t(turned, shared + 32 * (lane % 16) + 16 * (lane / 16));
  for (int i = 0; i < 4; i++) ((u32*)(c + 128))[4 * lane + i] = turned[i] ^ kv_movmatrix(a[i]);
}
KV_KERNEL(test_multiply_f16, KvTestParams, 32, 1, kv_test_multiply<KvF16>)
KV_KERNEL(test_multiply_bf16, KvTestParams, 32, 1, kv_test_multiply<KvBf16>)

// Reverses `count` numbers per block through shared memory; the last block adds up what all blocks
// noted.
KV_DEV void kv_test_last_block(const KvTestParams& p) {
  KV_DYN_SMEM(shared);
  u32* numbers = (u32*)shared;
  kv_grid_wait();
  numbers[threadIdx.x] = ((const u32*)p.in)[kv_test_index()];
  kv_sync();
  u32* out = (u32*)p.out;
  out[kv_test_index()] = numbers[127 - threadIdx.x];
  u32* notes = out + 128 * gridDim.x;
  u32* counter = notes + gridDim.x + 1;
  if (threadIdx.x == 0) notes[blockIdx.x] = numbers[127];
  kv_fence();
  kv_sync();
  if (threadIdx.x == 0) numbers[0] = kv_atomic_inc(counter, gridDim.x - 1);
  kv_sync();
  if (numbers[0] != gridDim.x - 1 || threadIdx.x >= 32) return;
  kv_fence();
  u32 sum = 0;
  for (u32 i = threadIdx.x; i < gridDim.x; i += 32) sum += kv_ldcg(notes + i);
  sum = kv_warp_sum_u32(sum);
  if (threadIdx.x == 0) notes[gridDim.x] = sum;
  kv_grid_launch();
}
KV_KERNEL(test_last_block, KvTestParams, 128, 1, kv_test_last_block)
