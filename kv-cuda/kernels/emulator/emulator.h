// The emulator as kernels see it: how a kernel is registered and where a thread finds itself.
//
// Every thread of a block is a fiber of one OS thread. A fiber runs until it meets a barrier or a warp collective whose
// other threads have yet to come, so the emulator sees who waits where, and says so when they can never meet. Blocks
// run one after another. What a kernel calls beyond this header is in device.h, the twin of the NVRTC part of dev.h.
#pragma once
#include <atomic>
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
  mutable std::atomic<u64> launches{0};
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
#define KV_TABLE static const
#define KV_DYN_SMEM(name) u8* const name = kvemu::shared_memory()
// A body that is a function of its own has lines of its own; all of a macro's argument is on one line, for reports.
#define KV_KERNEL(name, Params, threads, blocks, ...)                                    \
  static const kvemu::Kernel kv_kernel_##name{#name, sizeof(Params), threads, [](const void* params) { \
    (__VA_ARGS__)(*static_cast<const Params*>(params));                                  \
  }};

#include "device.h"
