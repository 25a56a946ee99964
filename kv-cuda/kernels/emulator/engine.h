// The execution of one launch: fibers, what they wait for, shared memory. One OS thread uses an
// engine at a time.
#pragma once
#include "../dev.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "fiber.h"

namespace kvemu {

enum class Wait : u8 { Nothing, Barrier, Warp, Grid };

constexpr u32 COPY_BYTES = 16;  // of an asynchronous copy, which is aligned to as much

// An asynchronous copy to shared memory, until the thread has waited for its group.
struct PendingCopy {
  void* to;
  const void* from;
  u32 valid;  // bytes that are read; the rest become zeros
  Site site;
  bool is_complete;     // carried out, early
  u8 data[COPY_BYTES];  // then: what was written
};

// One CUDA thread.
struct Fiber {
  Thread thread;
  Context context;
  Stack stack;
  bool is_done;
  bool has_waited;  // for the launch before
  Wait wait;
  Site site;       // where it waits
  u32 generation;  // of the barrier or warp: the fiber continues when it has changed
  std::vector<PendingCopy> copies;
  std::vector<u32> groups;  // committed groups, oldest first: the number of copies of each
  u32 open_copies;          // copies after the last group
  u32 incomplete_copies;
};

struct Warp {
  u32 arrived;  // a bit for every lane
  u32 generation;
  Collective what;
  Site site;
  // Double-buffered: a fast lane may reach the next collective before a slow one has read its
  // result.
  alignas(16) u8 in[2][32][LANE_IN];
  alignas(16) u8 out[2][32][LANE_OUT];
  char tokens[2];  // for ThreadSanitizer
};

struct Barrier {
  u32 arrived, generation;
  Site site;
  char tokens[2];
};

struct Launch {
  const Kernel* kernel;
  KvDim grid;
  u32 shared_bytes;
  const void* params;
  u32 seed;  // 0: blocks and threads in order
  const Launch* previous;  // that this one need not wait for before kv_grid_wait; null if there is none
};

// Runs a launch, after the previous one or around it. Returns an empty string, or what went wrong.
std::string run(const Launch& launch);

class Engine {
 public:
  // Runs all blocks. Returns an empty string, or what went wrong.
  std::string run(const Launch& launch);

  // Called by the running thread.
  void barrier(Site site);
  void grid_wait(Site site);
  void collective(const Collective& what, Site site, const void* in, u32 in_bytes, void* out, u32 out_bytes);
  void sync_warp(Site site);
  void start_copy(void* to, const void* from, u32 valid, Site site);
  void commit_copies();
  void wait_for_copies(u32 keep);
  // Fails if bytes of shared memory are those of a copy in flight.
  void require_readable(const void* at, u32 bytes, const char* what, Site site);
  [[noreturn]] __attribute__((format(printf, 2, 3))) void fail(const char* format, ...);
  Fiber& current() { return *fibers_[current_]; }
  u8* shared() { return shared_; }

 private:
  static void entry();
  void run_block(u32 index);
  void start_threads();
  void run_threads();
  bool run_warp(u32 warp);
  void shuffle_threads();
  bool can_run(const Fiber& fiber) const;
  void wait(Wait what, Site site, u32 generation);
  void run_previous();
  void require_grid_wait();
  void report_deadlock();
  void report(const char* text);
  void allocate_shared();
  void release_shared();
  void check_shared();
  // At a synchronisation point of the running thread: may carry out some of its copies.
  void advance_copies() {
    if (current().incomplete_copies > 0 && launch_.seed != 0 && random(copy_pace_) == 0) complete_some();
  }
  void complete_some();
  void complete(PendingCopy& copy);
  void report_copy(const PendingCopy& copy);
  void require_no_copies();
  [[noreturn]] void fail_written(const PendingCopy& copy);
  bool is_shared(const void* at, u32 bytes) const;
  bool is_in_flight(const void* at) const {
    return in_flight_[size_t(static_cast<const u8*>(at) - shared_) / COPY_BYTES] != 0;
  }
  void set_in_flight(void* at, bool is_in_flight);
  const PendingCopy& copy_to(const void* at) const;
  u32 random(u32 below);

  Launch launch_;
  u32 threads_, live_, current_;
  u32 random_;
  u32 copy_pace_;  // of a block: copies progress at one synchronisation point in copy_pace_
  Block block_;
  Barrier barrier_;
  Context scheduler_;
  std::vector<Fiber*> fibers_;  // never freed: reusing their stacks makes launches cheap
  std::vector<Warp> warps_;
  std::vector<u32> order_;  // threads in execution order, warp by warp
  u8* shared_ = nullptr;
  std::vector<u8> in_flight_;  // for each COPY_BYTES of shared memory, whether a copy to them is in flight
  std::vector<u8> arena_;        // shared memory of plain builds
  std::vector<u8*> used_shared_;  // shared memory of earlier blocks, if every block gets its own
  std::string error_;
  char launched_, ended_;  // for ThreadSanitizer: before the first and after the last thread
  char previous_ended_;    // and after the launch before
};

// The engine of this OS thread's launch.
extern __thread Engine* engine;

// Returns an unused engine. Engines outlive the OS threads that used them.
Engine* take_engine();
void give_engine(Engine* engine);

}  // namespace kvemu
