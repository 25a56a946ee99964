// Shared memory: exactly as large as the launch says, and filled with NaN.
//
// With AddressSanitizer it is an allocation of that size, so that every access past it is found.
// Otherwise the bytes after it are checked after each block. With ThreadSanitizer every block has
// its own, since blocks that use the same bytes do not share them on a GPU.
#include <cstdio>
#include <cstdlib>
#include <new>

#include "engine.h"
#include "sanitizer.h"

namespace kvemu {

namespace {
constexpr size_t ALIGN = 128;   // what KV_DYN_SMEM promises, and no more
constexpr size_t BEHIND = 256;  // bytes that are checked
constexpr u8 UNTOUCHED = 0xa5, UNWRITTEN = 0xff;

#if defined(KV_EMU_ASAN) || defined(KV_EMU_TSAN)
u8* allocate(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, ALIGN, bytes) != 0) throw std::bad_alloc();
  return static_cast<u8*>(memory);
}
#endif
}  // namespace

u8* shared_memory() { return engine->shared(); }

#if defined(KV_EMU_ASAN) || defined(KV_EMU_TSAN)

void Engine::allocate_shared() {
  in_flight_.assign(launch_.shared_bytes / COPY_BYTES + 1, 0);
  shared_ = allocate(launch_.shared_bytes);
  fill_bytes(shared_, UNWRITTEN, launch_.shared_bytes);
}

void Engine::check_shared() {
#ifdef KV_EMU_TSAN
  used_shared_.push_back(shared_);
  allocate_shared();
  happened_before(launched_);  // the new one was made before the next block
#else
  allow_access(shared_, launch_.shared_bytes);  // threads that failed have left copies in flight
  fill_bytes(shared_, UNWRITTEN, launch_.shared_bytes);
#endif
}

void Engine::release_shared() {
  used_shared_.push_back(shared_);
  for (u8* memory : used_shared_) free(memory);
  used_shared_.clear();
  shared_ = nullptr;
}

#else

void Engine::allocate_shared() {
  in_flight_.assign(launch_.shared_bytes / COPY_BYTES + 1, 0);
  const size_t bytes = launch_.shared_bytes;
  if (arena_.size() < bytes + BEHIND + 3 * ALIGN) arena_.resize(bytes + BEHIND + 3 * ALIGN);
  // An odd multiple of ALIGN, to expose kernels that assume more.
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(arena_.data()) + 2 * ALIGN - 1) / (2 * ALIGN) * (2 * ALIGN);
  shared_ = reinterpret_cast<u8*>(begin + ALIGN);
  fill_bytes(shared_, UNWRITTEN, bytes);
  fill_bytes(shared_ + bytes, UNTOUCHED, BEHIND);
}

void Engine::check_shared() {
  const size_t bytes = launch_.shared_bytes;
  for (size_t i = 0; i < BEHIND; i++) {
    if (shared_[bytes + i] == UNTOUCHED) continue;
    char text[128];
    snprintf(text, sizeof text, ": wrote %zu bytes past its %zu bytes of shared memory", i + 1, bytes);
    report(text);
    return;
  }
  fill_bytes(shared_, UNWRITTEN, bytes);
}

void Engine::release_shared() { shared_ = nullptr; }

#endif

}  // namespace kvemu
