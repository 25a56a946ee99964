// The emulator's interface to kernels: how a kernel is registered, and the state of a thread.
//
// Every thread of a block is a fiber of one OS thread. A fiber runs until it reaches a barrier or a
// warp collective that other threads have not reached yet. The emulator therefore knows which
// thread waits where, and reports a deadlock. Blocks run one after another. Other functions that
// kernels call are in device.h, the twin of the NVRTC part of dev.h.
#pragma once
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

struct KvDim { u32 x, y, z; };

namespace kvemu {

// A place in a kernel's source. As a default argument it is the caller's place.
struct Site {
  const char* file;
  int line;
  static Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

// State that all threads of a block share.
struct Block { KvDim index, threads, blocks; };

// State of one thread.
struct Thread {
  KvDim index;
  u32 lane, warp;
  const Block* block;
};

// The running thread. Fibers stay on the OS thread that launched them.
extern __thread const Thread* self;

// A kernel registers itself when the library is loaded, under the name by which the driver finds
// it.
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
void grid_wait(Site site);

// Maximum bytes of input and output of one lane of a warp collective.
constexpr u32 LANE_IN = 40, LANE_OUT = 16;
// Runs once, when the last lane of a warp has arrived.
typedef void (*Combine)(const u8 (*in)[LANE_IN], u8 (*out)[LANE_OUT], u32 argument);

// A call of all 32 lanes of a warp at the same place: each passes `in_bytes` and receives
// `out_bytes`. `name`, `argument` and `site` must be the same in all lanes.
struct Collective {
  const char* name;
  u32 argument;
  Combine combine;
};
void collective(const Collective& what, Site site, const void* in, u32 in_bytes, void* out, u32 out_bytes);
void sync_warp(Site site);

// Asynchronous copies of 16 bytes to shared memory: see copy.cpp. Of the source, `valid` bytes are
// read; the rest are zeros.
void copy_async(void* to, const void* from, u32 valid, Site site);
void copy_commit();
void copy_wait(u32 keep);
// Fails if bytes at an offset of shared memory cannot be read, because a copy to them is in flight.
void shared_read(u32 at, u32 bytes, const char* what, Site site);

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
// A macro's argument is all on one line in reports; a body that is a function of its own has lines
// of its own.
#define KV_KERNEL(name, Params, threads, blocks, ...)                                    \
  static const kvemu::Kernel kv_kernel_##name{#name, sizeof(Params), threads, [](const void* params) { \
    kv_grid_launch();                                                                    \
    kv_grid_wait();                                                                      \
    (__VA_ARGS__)(*static_cast<const Params*>(params));                                  \
  }};

#include "device.h"
