// kv_emu.h - CPU emulation of the CUDA execution model for kernels written against kv_dev.h.
// One OS thread runs one block at a time; every CUDA thread is a fiber. Works under ASan, TSan (race check) and UBSan.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
struct uint3_ { unsigned x, y, z; };
struct dim3_ { unsigned x = 1, y = 1, z = 1; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) int4 { i32 x, y, z, w; };
namespace kvemu {
// Every kernel registers itself, so that it is found by the name that the driver finds it by.
struct Kernel {
  const char* name; size_t params; u32 threads; void (*run)(const void*); Kernel* next;
  Kernel(const char* name, size_t params, u32 threads, void (*run)(const void*));
};
struct Ctx { uint3_ tid; int lane, warp; };
Ctx& cur();
uint3_& bidx(); dim3_& bdim(); dim3_& gdim();
u8* dyn_smem();
void barrier(const char* file, int line);
// warp collective: every lane gives `n` input bytes, `fin` runs once when all 32 lanes arrived
typedef void (*Fin)(const u8 (*in)[64], u8 (*out)[64]);
void warp_coll(int op, const char* file, int line, const void* in, int nin, void* out, int nout, Fin fin);
void warp_sync(const char* file, int line);
void cp_async(void* s, const void* g, int nbytes, int nvalid);
void cp_commit(); void cp_wait(int n);
struct Opt { u32 seed = 0; bool shuffle_blocks = false; bool shuffle_threads = false; };
// returns 0, or a non-zero code with a message on stderr (deadlock, divergent barrier, divergent warp collective)
int launch(dim3_ grid, dim3_ block, size_t smem_bytes, const std::function<void()>& kernel, Opt opt = Opt());
float half2f(u16 h); u16 f2half(float f); float e4m3_f(u8 x);
}
#define threadIdx (kvemu::cur().tid)
#define blockIdx (kvemu::bidx())
#define blockDim (kvemu::bdim())
#define gridDim (kvemu::gdim())
#define KV_DEV inline
#define KV_GLOBAL
#define KV_BOUNDS(t, b)
#define KV_GRID_CONST
#define KV_TABLE static const
#define KV_DYN_SMEM(name) u8* name = kvemu::dyn_smem()
#define kv_sync() kvemu::barrier(__FILE__, __LINE__)
#define kv_syncwarp() kvemu::warp_sync(__FILE__, __LINE__)
inline float kv_as_f(u32 x) { float f; std::memcpy(&f, &x, 4); return f; }
inline u32 kv_as_u(float f) { u32 x; std::memcpy(&x, &f, 4); return x; }
u32 kv_shfl_xor(u32 v, int m);
inline float kv_shfl_xorf(float v, int m) { return kv_as_f(kv_shfl_xor(kv_as_u(v), m)); }
inline float kv_exp2(float x) { return std::exp2(x); }
inline float kv_log2(float x) { return std::log2(x); }
inline float kv_rcp(float x) { return 1.0f / x; }
inline float kv_sqrt(float x) { return std::sqrt(x); }
inline float kv_max(float a, float b) { return std::fmax(a, b); }
inline u32 kv_prmt(u32 a, u32 b, u32 s) {
  u64 v = u64(a) | (u64(b) << 32); u32 r = 0;
  for (int i = 0; i < 4; i++) r |= u32((v >> (8 * ((s >> (4 * i)) & 7))) & 0xff) << (8 * i);
  return r;
}
inline void kv_cp_async16(void* s, const void* g, bool p) { kvemu::cp_async(s, g, 16, p ? 16 : 0); }
inline void kv_cp_commit() { kvemu::cp_commit(); }
template <int N> inline void kv_cp_wait() { kvemu::cp_wait(N); }
void kv_ldsm4(u32 (&r)[4], const void* p);
void kv_ldsm4t(u32 (&r)[4], const void* p);
struct KvBf16 {}; struct KvF16 {};
void kv_mma(KvBf16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
void kv_mma(KvF16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
inline u16 kv_f_bf16(float f) { u32 x = kv_as_u(f); if ((x & 0x7fffffff) > 0x7f800000) return u16((x >> 16) | 0x40); return u16((x + 0x7fff + ((x >> 16) & 1)) >> 16); }
inline u32 kv_pack(KvBf16, float lo, float hi) { return u32(kv_f_bf16(lo)) | (u32(kv_f_bf16(hi)) << 16); }
inline u32 kv_pack(KvF16, float lo, float hi) { return u32(kvemu::f2half(lo)) | (u32(kvemu::f2half(hi)) << 16); }
inline u32 kv_e4m3x2_f16x2(u32 x) { return u32(kvemu::f2half(kvemu::e4m3_f(u8(x)))) | (u32(kvemu::f2half(kvemu::e4m3_f(u8(x >> 8)))) << 16); }
inline float kv_bf16_f(u16 x) { return kv_as_f(u32(x) << 16); }
inline float kv_f16_f(u16 x) { return kvemu::half2f(x); }
inline i32 kv_ldg(const i32* p) { return *p; }
inline void kv_fence() {}  // ordering is carried by the acq_rel atomics below
inline u32 kv_atomic_inc(u32* p, u32 wrap) {
  u32 o = __atomic_load_n(p, __ATOMIC_ACQUIRE), n;
  do { n = o >= wrap ? 0 : o + 1; } while (!__atomic_compare_exchange_n(p, &o, n, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  return o;
}
inline float kv_ldcg(const float* p) { return *p; }
#define KV_KERNEL(name, Params, threads, blocks, ...) \
  static kvemu::Kernel kv_kernel_##name{#name, sizeof(Params), threads, [](const void* p) { (__VA_ARGS__)(*(const Params*)p); }};
