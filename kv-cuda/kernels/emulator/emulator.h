// The emulator as kernels see it: how a kernel is registered and where a thread finds itself.
//
// Every thread of a block is a fiber of one OS thread. A fiber runs until it meets a barrier or a warp collective whose
// other threads have yet to come, so the emulator sees who waits where, and says so when they can never meet. Blocks
// run one after another. What a kernel calls beyond this header is in device.h, the twin of the NVRTC part of dev.h.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

struct KvDim { u32 x, y, z; };

namespace kvemu {

// A place in a kernel's source. As a default argument it is that of the caller.
struct Site {
  const char* file;
  int line;
  static Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

// What all threads of a block share.
struct Block { KvDim index, threads, blocks; };

// What a thread knows of itself.
struct Thread {
  KvDim index;
  u32 lane, warp;
  const Block* block;
};

// The thread that runs. Fibers stay on the OS thread that launched them.
extern __thread const Thread* self;

// A kernel registers itself when the library is loaded, under the name that the driver would find it by.
struct Kernel {
  const char* name;
  u32 params_bytes, threads;
  void (*run)(const void* params);
  const Kernel* next;
  Kernel(const char* name, size_t params_bytes, u32 threads, void (*run)(const void*));
};

u8* shared_memory();
void barrier(Site site);

// Bytes of one lane that a warp collective takes, and gives.
constexpr u32 LANE_IN = 40, LANE_OUT = 16;
// Runs once, when the last lane of a warp has come.
typedef void (*Combine)(const u8 (*in)[LANE_IN], u8 (*out)[LANE_OUT], u32 argument);

// What all 32 lanes of a warp call at the same place: each gives `in_bytes` and gets `out_bytes`. `name` and `argument`
// must be the same in all lanes, and so must `site`.
struct Collective {
  const char* name;
  u32 argument;
  Combine combine;
};
void collective(const Collective& what, Site site, const void* in, u32 in_bytes, void* out, u32 out_bytes);
void sync_warp(Site site);

// Copies to shared memory that land late: the destination reads as NaN until the thread waits for its group.
void copy_async(void* to, const void* from, u32 bytes, u32 valid, Site site);
void copy_commit();
void copy_wait(u32 keep);

}  // namespace kvemu

#define threadIdx (kvemu::self->index)
#define blockIdx (kvemu::self->block->index)
#define blockDim (kvemu::self->block->threads)
#define gridDim (kvemu::self->block->blocks)
#define KV_DEV inline
#define KV_GLOBAL
#define KV_BOUNDS(threads, blocks)
#define KV_GRID_CONST
<<<<<<< HEAD
#define KV_DYN_SMEM(name) u8* const name = kvemu::shared_memory()
#define KV_KERNEL(name, Params, threads, blocks, ...)                                    \
  static const kvemu::Kernel kv_kernel_##name{#name, sizeof(Params), threads, [](const void* params) { \
    (__VA_ARGS__)(*static_cast<const Params*>(params));                                  \
  }};

#include "device.h"
=======
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
>>>>>>> cuda
