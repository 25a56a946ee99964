// Device functions on the emulator: the twin of the NVRTC part of dev.h, in the same order.
#pragma once
#include "approximate.h"
#include "numbers.h"

struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) int4 { i32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

// ---- Barriers and warp collectives. `site` is the caller's, for reports.
inline void kv_sync(kvemu::Site site = kvemu::Site::here()) { kvemu::barrier(site); }
inline void kv_syncwarp(kvemu::Site site = kvemu::Site::here()) { kvemu::sync_warp(site); }
u32 kv_shfl(u32 v, u32 lane, kvemu::Site site = kvemu::Site::here());
u32 kv_shfl_down(u32 v, u32 by, kvemu::Site site = kvemu::Site::here());
u32 kv_shfl_xor(u32 v, int mask, kvemu::Site site = kvemu::Site::here());
u32 kv_ballot(bool v, kvemu::Site site = kvemu::Site::here());

// ---- Numbers
inline float kv_as_f(u32 x) { return kvemu::as_float(x); }
inline u32 kv_as_u(float f) { return kvemu::as_bits(f); }
inline float kv_shflf(float v, u32 lane, kvemu::Site site = kvemu::Site::here()) {
  return kv_as_f(kv_shfl(kv_as_u(v), lane, site));
}
inline float kv_shfl_downf(float v, u32 by, kvemu::Site site = kvemu::Site::here()) {
  return kv_as_f(kv_shfl_down(kv_as_u(v), by, site));
}
inline float kv_shfl_xorf(float v, int mask, kvemu::Site site = kvemu::Site::here()) {
  return kv_as_f(kv_shfl_xor(kv_as_u(v), mask, site));
}
inline bool kv_any(bool v, kvemu::Site site = kvemu::Site::here()) { return kv_ballot(v, site) != 0; }
inline bool kv_all(bool v, kvemu::Site site = kvemu::Site::here()) { return kv_ballot(v, site) == 0xffffffffu; }
// The approximate instructions, with the largest errors that the PTX manual allows: see approximate.h.
inline float kv_exp2(float x) { return kvemu::ex2_approx(x); }
inline float kv_log2(float x) { return kvemu::lg2_approx(x); }
inline float kv_rcp(float x) { return kvemu::rcp_approx(x); }
inline float kv_max(float a, float b) { return std::fmax(a, b); }
inline float kv_min(float a, float b) { return std::fmin(a, b); }
inline float kv_rint(float x) { return std::nearbyint(x); }
inline float kv_floor(float x) { return std::floor(x); }
inline float kv_fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float kv_add_rn(float a, float b) { return a + b; }
inline float kv_sub_rn(float a, float b) { return a - b; }
inline float kv_mul_rn(float a, float b) { return a * b; }
inline float kv_div_rn(float a, float b) { return a / b; }
inline float kv_sqrt(float x) { return std::sqrt(x); }
inline i32 kv_float_to_int_rn(float x) {
  if (x != x) return 0;
  if (x >= 2147483648.0f) return 0x7fffffff;
  return x < -2147483648.0f ? -0x7fffffff - 1 : i32(std::nearbyint(x));
}
[[noreturn]] void kv_unknown_format(u32 format, kvemu::Site site = kvemu::Site::here());
inline u32 kv_popc(u32 x) { return u32(__builtin_popcount(x)); }
inline u32 kv_clz(u32 x) { return x == 0 ? 32 : u32(__builtin_clz(x)); }
inline u32 kv_prmt(u32 a, u32 b, u32 selector) {
  const u64 bytes = u64(a) | (u64(b) << 32);
  u32 result = 0;
  for (u32 i = 0; i < 4; i++) {
    const u32 byte = u32(bytes >> (8 * ((selector >> (4 * i)) & 7))) & 0xffu;
    result |= byte << (8 * i);
  }
  return result;
}
inline u32 kv_prmt_table(u32 a, u32 b, u32 selector) { return kv_prmt(a, b, selector); }

// ---- Asynchronous copies to shared memory
inline void kv_cp_async16(void* to, const void* from, bool valid, kvemu::Site site = kvemu::Site::here()) {
  kvemu::copy_async(to, from, valid ? 16 : 0, site);
}
// Shared memory has its own address space, which begins at 0.
inline u32 kv_smem_addr(const void* p) { return u32((const u8*)p - kvemu::shared_memory()); }
inline void kv_cp_async16_at(u32 to, const void* from, kvemu::Site site = kvemu::Site::here()) {
  kvemu::copy_async(kvemu::shared_memory() + to, from, 16, site);
}
inline void kv_cp_commit() { kvemu::copy_commit(); }
template <int N> inline void kv_cp_wait() { kvemu::copy_wait(u32(N)); }

// ---- Tensor cores: called by all lanes of a warp
struct KvBf16 {};
struct KvF16 {};
void kv_ldsm4(u32 (&r)[4], const void* row, u32 offset = 0, kvemu::Site site = kvemu::Site::here());
void kv_ldsm4t(u32 (&r)[4], const void* row, u32 offset = 0, kvemu::Site site = kvemu::Site::here());
inline void kv_ldsm4_at(u32 (&r)[4], u32 a, kvemu::Site site = kvemu::Site::here()) {
  kv_ldsm4(r, kvemu::shared_memory() + a, 0, site);
}
inline void kv_ldsm4t_at(u32 (&r)[4], u32 a, kvemu::Site site = kvemu::Site::here()) {
  kv_ldsm4t(r, kvemu::shared_memory() + a, 0, site);
}
// uint4, uint2, u32 or u16, aligned to its size.
template <class T> inline void kv_lds_at(u32 a, T& v, kvemu::Site site = kvemu::Site::here()) {
  kvemu::shared_read(a, sizeof v, "kv_lds_at", site);
  v = *(const T*)(kvemu::shared_memory() + a);
}
u32 kv_movmatrix(u32 v, kvemu::Site site = kvemu::Site::here());
void kv_mma(KvBf16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, kvemu::Site site = kvemu::Site::here());
void kv_mma(KvF16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, kvemu::Site site = kvemu::Site::here());

// ---- Numbers of 16 and 8 bits
inline u32 kv_pack(KvBf16, float low, float high) {
  return u32(kvemu::float_to_bf16(low)) | (u32(kvemu::float_to_bf16(high)) << 16);
}
inline u32 kv_pack(KvF16, float low, float high) {
  return u32(kvemu::float_to_half(low)) | (u32(kvemu::float_to_half(high)) << 16);
}
inline u32 kv_e4m3x2_f16x2(u32 x) {
  return kv_pack(KvF16(), kvemu::e4m3_to_float(u8(x)), kvemu::e4m3_to_float(u8(x >> 8)));
}
inline void kv_e4m3x4_f16x2(u32 x, u32& low, u32& high) {
  low = kv_e4m3x2_f16x2(x), high = kv_e4m3x2_f16x2(x >> 16);
}
inline u32 kv_int8x2_f16x2(u32 x) { return kv_pack(KvF16(), float(i8(x)), float(i8(x >> 8))); }
constexpr u32 KV_INT8_EXPONENTS = 0x64646464u;
inline void kv_int8x4_f16x2(u32 x, u32& low, u32& high, u32 = KV_INT8_EXPONENTS) {
  low = kv_int8x2_f16x2(x), high = kv_int8x2_f16x2(x >> 16);
}
inline float kv_bf16_f(u16 x) { return kvemu::bf16_to_float(x); }
inline float kv_f16_f(u16 x) { return kvemu::half_to_float(x); }

// ---- Global memory
template <class T> inline T kv_ldg(const T* p) { return *p; }
template <class T> inline T kv_ldcg(const T* p) { return *p; }
template <class T> inline T kv_ldcs(const T* p) { return *p; }
template <class T> inline void kv_stcs(T* p, T v) { *p = v; }
inline uint4 kv_ld_stream(const uint4* p) { return *p; }
inline void kv_fence() {}  // the atomics below carry the order
inline u32 kv_atomic_add(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
inline u32 kv_atomic_max(u32* p, u32 v) {
  u32 old = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  while (!__atomic_compare_exchange_n(p, &old, old > v ? old : v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {}
  return old;
}
inline u32 kv_atomic_inc(u32* p, u32 wrap) {
  u32 old = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  while (!__atomic_compare_exchange_n(p, &old, old >= wrap ? 0 : old + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {}
  return old;
}

// ---- Overlapping launches: see grid.cpp
inline void kv_grid_wait(kvemu::Site site = kvemu::Site::here()) { kvemu::grid_wait(site); }
inline void kv_grid_launch() {}
