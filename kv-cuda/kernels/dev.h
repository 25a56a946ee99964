// The device layer: types, and a function for each instruction or intrinsic that C++ cannot
// express. It is the only device header of the kernels. NVRTC compiles it with inline PTX and
// without CUDA headers; the emulator (-DKV_EMU) compiles it as plain C++ with emulator/device.h in
// place of the functions below.
#pragma once
typedef unsigned char      u8;
typedef signed char        i8;
typedef unsigned short     u16;
typedef unsigned int       u32;
typedef int                i32;
typedef unsigned long long u64;
typedef long long          i64;

#if defined(KV_EMU)
#include "emulator/emulator.h"
#else
#define KV_DEV __device__ __forceinline__
#define KV_GLOBAL __global__
#define KV_BOUNDS(t, b) __launch_bounds__(t, b)
#define KV_DYN_SMEM(name) extern __shared__ __align__(128) u8 name[]
#define KV_GRID_CONST __grid_constant__
// Constants in global memory. Unlike reads of `__constant__` memory, reads by different indices in
// a warp are not serialised.
#define KV_TABLE static __device__ const
KV_DEV void kv_sync()      { __syncthreads(); }
KV_DEV void kv_syncwarp()  { __syncwarp(); }
// Warp collectives, which all 32 lanes call at the same place. A shuffle down past lane 31 returns
// the lane's own value.
KV_DEV u32   kv_shfl(u32 v, u32 lane)        { return __shfl_sync(0xffffffffu, v, lane); }
KV_DEV float kv_shflf(float v, u32 lane)     { return __shfl_sync(0xffffffffu, v, lane); }
KV_DEV u32   kv_shfl_down(u32 v, u32 by)     { return __shfl_down_sync(0xffffffffu, v, by); }
KV_DEV float kv_shfl_downf(float v, u32 by)  { return __shfl_down_sync(0xffffffffu, v, by); }
KV_DEV u32   kv_shfl_xor(u32 v, int mask)    { return __shfl_xor_sync(0xffffffffu, v, mask); }
KV_DEV float kv_shfl_xorf(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
KV_DEV u32   kv_ballot(bool v)               { return __ballot_sync(0xffffffffu, v); }
KV_DEV bool  kv_any(bool v)                  { return __any_sync(0xffffffffu, v) != 0; }
KV_DEV bool  kv_all(bool v)                  { return __all_sync(0xffffffffu, v) != 0; }
KV_DEV float kv_as_f(u32 x) { return __uint_as_float(x); }
KV_DEV u32   kv_as_u(float x) { return __float_as_uint(x); }
KV_DEV float kv_exp2(float x) { float y; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }
KV_DEV float kv_log2(float x) { float y; asm("lg2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }
KV_DEV float kv_rcp(float x)  { float y; asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }
KV_DEV float kv_max(float a, float b) { return fmaxf(a, b); }  // of a number and a NaN: the number
KV_DEV float kv_min(float a, float b) { return fminf(a, b); }
KV_DEV float kv_rint(float x)  { return rintf(x); }  // ties to even
KV_DEV float kv_floor(float x) { return floorf(x); }
// Rounded once, never contracted to FMA and never flushed to zero: bit for bit as on the host.
KV_DEV float kv_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
KV_DEV float kv_add_rn(float a, float b) { return __fadd_rn(a, b); }
KV_DEV float kv_sub_rn(float a, float b) { return __fsub_rn(a, b); }
KV_DEV float kv_mul_rn(float a, float b) { return __fmul_rn(a, b); }
KV_DEV float kv_div_rn(float a, float b) { return __fdiv_rn(a, b); }
KV_DEV i32 kv_float_to_int_rn(float x) { return __float2int_rn(x); }  // saturates; 0 for NaN
// Marks a stored format without a case. The host launches no kernel with one; the emulator fails.
[[noreturn]] KV_DEV void kv_unknown_format(u32) { __builtin_unreachable(); }
KV_DEV u32 kv_popc(u32 x) { return __popc(x); }
KV_DEV u32 kv_clz(u32 x) { return __clz(x); }
KV_DEV float kv_sqrt(float x) { float y; asm("sqrt.rn.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }
KV_DEV u32 kv_prmt(u32 a, u32 b, u32 s) { return __byte_perm(a, b, s); }
// The same with a selector whose lower nibbles are at most 7: __byte_perm would mask them again.
KV_DEV u32 kv_prmt_table(u32 a, u32 b, u32 s) { u32 r; asm("prmt.b32 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(s)); return r; }
KV_DEV u32 kv_smem_addr(const void* p) { u32 a; asm("{ .reg .u64 t; cvta.to.shared.u64 t,%1; cvt.u32.u64 %0,t; }" : "=r"(a) : "l"(p)); return a; }
#if __CUDA_ARCH__ >= 800
KV_DEV void kv_cp_async16(void* s, const void* g, bool pred) {
  int n = pred ? 16 : 0;  // src-size 0 => zero fill
  asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16,%2;" ::"r"(kv_smem_addr(s)), "l"(g), "r"(n) : "memory");
}
// Copies unconditionally, to an address in the shared window.
KV_DEV void kv_cp_async16_at(u32 s, const void* g) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16;" ::"r"(s), "l"(g) : "memory");
}
KV_DEV void kv_cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> KV_DEV void kv_cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
#else
KV_DEV void kv_cp_async16(void* s, const void* g, bool pred) {
  uint4 v = make_uint4(0, 0, 0, 0); if (pred) v = *(const uint4*)g; *(uint4*)s = v;
}
KV_DEV void kv_cp_async16_at(u32 s, const void* g) {
  const uint4 v = *(const uint4*)g;
  asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(s), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
KV_DEV void kv_cp_commit() {}
template <int N> KV_DEV void kv_cp_wait() {}
#endif
// ldmatrix from `offset` bytes after `p`. A constant offset becomes an immediate of the
// instruction. Added to the generic pointer instead, each sum would be converted to the shared
// window separately and occupy a register during a loop.
KV_DEV void kv_ldsm4(u32 (&r)[4], const void* p, u32 offset = 0) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(kv_smem_addr(p) + offset) : "memory");
}
KV_DEV void kv_ldsm4t(u32 (&r)[4], const void* p, u32 offset = 0) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(kv_smem_addr(p) + offset) : "memory");
}
// The same by addresses in the shared window (kv_smem_addr): half the registers and additions of
// generic pointers.
KV_DEV void kv_ldsm4_at(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
KV_DEV void kv_ldsm4t_at(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
KV_DEV void kv_lds_at(u32 a, uint4& v) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
}
KV_DEV void kv_lds_at(u32 a, uint2& v) {
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory");
}
KV_DEV void kv_lds_at(u32 a, u32& v) { asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(a) : "memory"); }
KV_DEV void kv_lds_at(u32 a, u16& v) { asm volatile("ld.shared.u16 %0,[%1];" : "=h"(v) : "r"(a) : "memory"); }
// Transposes an 8 x 8 matrix of 16-bit elements that is one register of a fragment.
KV_DEV u32 kv_movmatrix(u32 v) {
  u32 r; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(r) : "r"(v)); return r;
}
struct KvBf16 {}; struct KvF16 {};
#if __CUDA_ARCH__ >= 800
KV_DEV void kv_mma(KvBf16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
KV_DEV void kv_mma(KvF16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
KV_DEV u32 kv_pack(KvBf16, float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
KV_DEV u32 kv_pack(KvF16, float lo, float hi) { u32 r; asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
#else  // sm_75: only m16n8k8 f16
KV_DEV void kv_mma(KvF16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
}
KV_DEV u32 kv_pack(KvF16, float lo, float hi) {
  u16 l, h; asm("cvt.rn.f16.f32 %0,%1;" : "=h"(l) : "f"(lo)); asm("cvt.rn.f16.f32 %0,%1;" : "=h"(h) : "f"(hi)); return u32(l) | (u32(h) << 16);
}
#endif
// Converts two e4m3 (low 16 bits of x) to f16x2, or four: the lower two, and the upper two.
#if __CUDA_ARCH__ >= 890
KV_DEV u32 kv_e4m3x2_f16x2(u32 x) { u32 r; u16 h = (u16)x; asm("cvt.rn.f16x2.e4m3x2 %0,%1;" : "=r"(r) : "h"(h)); return r; }
KV_DEV void kv_e4m3x4_f16x2(u32 x, u32& low, u32& high) {
  asm("{ .reg .b16 l,h; mov.b32 {l,h},%2; cvt.rn.f16x2.e4m3x2 %0,l; cvt.rn.f16x2.e4m3x2 %1,h; }" : "=r"(low), "=r"(high) : "r"(x));
}
#else
KV_DEV u32 kv_e4m3x2_f16x2(u32 x) {  // exponent re-bias by multiply with 2^8 in f16 (exact)
  u32 q = kv_prmt(x, 0, 0x1404);  // byte0 -> bits 8..15, byte1 -> bits 24..31
  u32 o = (q & 0x80008000u) | ((q & 0x7f007f00u) >> 1);
  u32 r; asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(o), "r"(0x5c005c00u));  // 0x5c00 = 256.0
  return r | ((((o & 0x7fff7fffu) + 0x00800080u) >> 1) & 0x20002000u);        // 480 encodes NaN
}
KV_DEV void kv_e4m3x4_f16x2(u32 x, u32& low, u32& high) { low = kv_e4m3x2_f16x2(x), high = kv_e4m3x2_f16x2(x >> 16); }
#endif
constexpr u32 KV_INT8_EXPONENTS = 0x64646464u;
// Converts two int8 (low 16 bits of x) to f16x2, exactly: the bits of 1024 + 128 + value, minus
// 1152.
KV_DEV u32 kv_int8x2_f16x2(u32 x) {
  u32 r, u = kv_prmt(x ^ 0x8080u, 0x64646464u, 0x4140);
  asm("sub.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(u), "r"(0x64806480u)); return r;
}
// Converts four int8 to f16x2: the lower two, and the upper two. `exponents` is KV_INT8_EXPONENTS.
KV_DEV void kv_int8x4_f16x2(u32 x, u32& low, u32& high, u32 exponents = KV_INT8_EXPONENTS) {
  const u32 biased = x ^ 0x80808080u, l = kv_prmt(biased, exponents, 0x4140), h = kv_prmt(biased, exponents, 0x4342);
  asm("sub.rn.f16x2 %0,%1,%2;" : "=r"(low) : "r"(l), "r"(0x64806480u));
  asm("sub.rn.f16x2 %0,%1,%2;" : "=r"(high) : "r"(h), "r"(0x64806480u));
}
KV_DEV float kv_bf16_f(u16 x) { return kv_as_f(u32(x) << 16); }
KV_DEV float kv_f16_f(u16 x) { float f; asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(x)); return f; }
// Global loads and stores of a builtin type of up to 16 bytes, aligned to its size: of data that
// the launch does not write (ldg), that other thread blocks wrote (ldcg), or that is used once
// (ldcs, stcs, ld_stream).
template <class T> KV_DEV T kv_ldg(const T* p) { return __ldg(p); }
template <class T> KV_DEV T kv_ldcg(const T* p) { return __ldcg(p); }
template <class T> KV_DEV T kv_ldcs(const T* p) { return __ldcs(p); }
template <class T> KV_DEV void kv_stcs(T* p, T v) { __stcs(p, v); }
KV_DEV uint4 kv_ld_stream(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
KV_DEV void kv_fence() { __threadfence(); }
// Atomics that return the old value. `inc` wraps to 0 after `wrap`.
KV_DEV u32 kv_atomic_add(u32* p, u32 v) { return atomicAdd(p, v); }
KV_DEV u32 kv_atomic_max(u32* p, u32 v) { return atomicMax(p, v); }
KV_DEV u32 kv_atomic_inc(u32* p, u32 wrap) { return atomicInc(p, wrap); }
// Programmatic dependent launch: waits until the kernels before are complete and their writes
// visible; lets the next kernel start, which waits in turn.
KV_DEV void kv_grid_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
KV_DEV void kv_grid_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Defines the kernel `name`, which calls `body(params)` with `threads` threads per block and at
// least `blocks` resident blocks per multiprocessor.
//
// Every kernel may be launched before the previous one has ended (src/driver/dependent.rs), so every
// thread waits before all else. That it waits for the previous kernel alone suffices, because that
// one waited too: no kernel of this crate may end without kv_grid_wait. The next one starts as soon
// as all thread blocks of this one have started.
#define KV_KERNEL(name, Params, threads, blocks, ...)                                                         \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Params p) { \
    kv_grid_launch();                                                                                    \
    kv_grid_wait();                                                                                      \
    (__VA_ARGS__)(p);                                                                                    \
  }
#endif

// Reductions over each run of LANES lanes, with the result in all of them. Sums are added in a tree
// of fixed shape.
template <int LANES = 32> KV_DEV float kv_warp_sum(float v) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) v = kv_add_rn(v, kv_shfl_xorf(v, mask));
  return v;
}
template <int LANES = 32> KV_DEV float kv_warp_max(float v) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) v = kv_max(v, kv_shfl_xorf(v, mask));
  return v;
}
template <int LANES = 32> KV_DEV u32 kv_warp_sum_u32(u32 v) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) v += kv_shfl_xor(v, mask);
  return v;
}
template <int LANES = 32> KV_DEV u32 kv_warp_max_u32(u32 v) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) {
    const u32 other = kv_shfl_xor(v, mask);
    v = other > v ? other : v;
  }
  return v;
}

// Functions with the same name in NVRTC and the host's library; on the device accurate to 1 or 2
// ulp.
KV_DEV float kv_exp(float x)  { return expf(x); }
KV_DEV float kv_log(float x)  { return logf(x); }
KV_DEV float kv_tanh(float x) { return tanhf(x); }
KV_DEV float kv_infinity() { return kv_as_f(0x7f800000u); }
// Vectors of 16 bytes that are loaded and stored by one instruction.
struct alignas(16) KvFloat4 { float x, y, z, w; };
struct alignas(16) KvWord4 { u32 x, y, z, w; };
// A function that is not inlined: called from several places, and not performance-critical.
#if defined(KV_EMU)
#define KV_DEV_CALL inline __attribute__((noinline))
#else
#define KV_DEV_CALL __device__ __noinline__
#endif
