// Test helpers: counting failures, and launching by name.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../../dev.h"

extern "C" int kv_emu_launch(const char* name, const u32 grid[3], u32 threads, u32 shared_bytes, const void* params,
                             u32 params_bytes, u32 seed, char* error, u32 error_bytes);

namespace test {

// A launch of a chain: KvEmuLaunch of the library.
struct EmulatedLaunch {
  const char* name;
  const void* params;
  u32 grid[3];
  u32 threads, shared_bytes, params_bytes, seed;
};

}  // namespace test

extern "C" int kv_emu_launch_chain(const test::EmulatedLaunch* all, u32 count, char* error, u32 error_bytes);

namespace test {

inline int failures = 0;

#define KV_CHECK(condition, ...)                               \
  do {                                                         \
    if (!(condition)) {                                        \
      if (test::failures++ < 20) {                             \
        printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
        printf(__VA_ARGS__);                                   \
        printf("\n");                                          \
      }                                                        \
    }                                                          \
  } while (false)

// Returns an empty string if the kernel ran to its end, otherwise the emulator's error.
template <class Params>
std::string launch(const char* name, u32 blocks, u32 threads, u32 shared_bytes, const Params& params, u32 seed) {
  const u32 grid[3] = {blocks, 1, 1};
  char error[1024] = "";
  const int code = kv_emu_launch(name, grid, threads, shared_bytes, &params, sizeof params, seed, error, sizeof error);
  KV_CHECK((code == 0) == (error[0] == 0), "%s: code %d, text %s", name, code, error);
  return error;
}

template <class T> u64 address(std::vector<T>& list) { return u64(reinterpret_cast<uintptr_t>(list.data())); }

// Pseudo-random numbers that are the same everywhere.
struct Random {
  u64 state = 88172645463325252ull;
  u64 next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
  }
  u32 below(u32 bound) { return u32(next() >> 20) % bound; }
  // Returns a nearly normal number: the sum of some uniform numbers.
  float normal() {
    double sum = -6;
    for (int i = 0; i < 12; i++) sum += double(next() >> 11) * 0x1p-53;
    return float(sum);
  }
};

}  // namespace test
