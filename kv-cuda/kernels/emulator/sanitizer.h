// Annotations for sanitizers; empty in a build without them.
//
// For ThreadSanitizer the kernels are compiled with -fsanitize=thread; the emulator is not, but
// with KV_EMU_TSAN, because fibers share its own bookkeeping on purpose. It reports the accesses
// that it makes for a kernel, and the order that barriers establish.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#define KV_EMU_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifdef KV_EMU_TSAN
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
}
#endif

namespace kvemu {

// Everything done before `happened_before(token)` is visible after `happened_after(token)`.
inline void happened_before(char& token) {
  (void)token;
#ifdef KV_EMU_TSAN
  __tsan_release(&token);
#endif
}
inline void happened_after(char& token) {
  (void)token;
#ifdef KV_EMU_TSAN
  __tsan_acquire(&token);
#endif
}

// Reports accesses of the running thread.
inline void reads(const void* at, size_t bytes) {
  (void)at, (void)bytes;
#ifdef KV_EMU_TSAN
  if (bytes > 0) __tsan_read_range(const_cast<void*>(at), bytes);
#endif
}
inline void writes(void* at, size_t bytes) {
  (void)at, (void)bytes;
#ifdef KV_EMU_TSAN
  if (bytes > 0) __tsan_write_range(at, bytes);
#endif
}

// Lets AddressSanitizer report every access to some bytes, or none.
inline void forbid_access(void* at, size_t bytes) {
  (void)at, (void)bytes;
#ifdef KV_EMU_ASAN
  __asan_poison_memory_region(at, bytes);
#endif
}
inline void allow_access(void* at, size_t bytes) {
  (void)at, (void)bytes;
#ifdef KV_EMU_ASAN
  __asan_unpoison_memory_region(at, bytes);
#endif
}

// Copies without reporting it to ThreadSanitizer, as its memcpy would.
inline void copy_bytes(void* to, const void* from, size_t bytes) {
#ifdef KV_EMU_TSAN
  volatile uint8_t* out = static_cast<uint8_t*>(to);
  const volatile uint8_t* in = static_cast<const uint8_t*>(from);
  for (size_t i = 0; i < bytes; i++) out[i] = in[i];
#else
  if (bytes == 4) std::memcpy(to, from, 4);  // most collectives: a copy without a call
  else if (bytes > 0) std::memcpy(to, from, bytes);  // null goes with 0 bytes
#endif
}
inline void fill_bytes(void* to, uint8_t byte, size_t bytes) {
#ifdef KV_EMU_TSAN
  volatile uint8_t* out = static_cast<uint8_t*>(to);
  for (size_t i = 0; i < bytes; i++) out[i] = byte;
#else
  std::memset(to, byte, bytes);
#endif
}
inline bool same_bytes(const void* a, const void* b, size_t bytes) {
#ifdef KV_EMU_TSAN
  const volatile uint8_t *left = static_cast<const uint8_t*>(a), *right = static_cast<const uint8_t*>(b);
  for (size_t i = 0; i < bytes; i++) {
    if (left[i] != right[i]) return false;
  }
  return true;
#else
  return std::memcmp(a, b, bytes) == 0;
#endif
}

}  // namespace kvemu
