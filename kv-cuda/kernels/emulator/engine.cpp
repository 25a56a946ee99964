// The order of blocks and threads, and the report when none can run.
#include "engine.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <mutex>

#include "sanitizer.h"

namespace kvemu {

__thread const Thread* self = nullptr;
__thread Engine* engine = nullptr;

namespace {
std::mutex idle_lock;
std::vector<Engine*>& idle() {
  static std::vector<Engine*>& list = *new std::vector<Engine*>;  // lives as long as any thread
  return list;
}
}  // namespace

Engine* take_engine() {
  const std::lock_guard<std::mutex> guard(idle_lock);
  if (idle().empty()) return new Engine();
  Engine* engine = idle().back();
  idle().pop_back();
  return engine;
}

void give_engine(Engine* engine) {
  const std::lock_guard<std::mutex> guard(idle_lock);
  idle().push_back(engine);
}

std::string Engine::run(const Launch& launch) {
  launch_ = launch;
  threads_ = launch.kernel->threads;
  random_ = launch.seed * 2654435761u | 1u;
  error_.clear();
  while (fibers_.size() < threads_) fibers_.push_back(new Fiber());
  warps_.resize(threads_ / 32);
  order_.resize(threads_);
  for (u32 i = 0; i < threads_; i++) order_[i] = i;
  enter_scheduler(scheduler_);
  allocate_shared();
  happened_before(launched_);
  const u64 blocks = u64(launch.grid.x) * launch.grid.y * launch.grid.z;
  std::vector<u32> shuffled;
  if (launch.seed != 0) {
    shuffled.resize(blocks);
    for (u32 i = 0; i < blocks; i++) shuffled[i] = i;
    for (u32 i = u32(blocks); i > 1; i--) std::swap(shuffled[i - 1], shuffled[random(i)]);
  }
  for (u32 i = 0; i < blocks && error_.empty(); i++) run_block(launch.seed != 0 ? shuffled[i] : i);
  happened_after(ended_);
  release_shared();
  return error_;
}

void Engine::run_block(u32 index) {
  const KvDim& grid = launch_.grid;
  block_ = {{index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y}, {threads_, 1, 1}, grid};
  barrier_.arrived = 0;
  for (Warp& warp : warps_) warp.arrived = 0;
  // From at once to hardly ever before the wait.
  copy_pace_ = launch_.seed != 0 ? 1u << 2 * random(5) : 0;
  start_threads();
  run_threads();
  check_shared();
}

void Engine::start_threads() {
  live_ = threads_;
  for (u32 i = 0; i < threads_; i++) {
    Fiber& fiber = *fibers_[i];
    fiber.thread = {{i, 0, 0}, i % 32, i / 32, &block_};
    fiber.is_done = fiber.has_waited = false;
    fiber.wait = Wait::Nothing;
    fiber.copies.clear();
    fiber.groups.clear();
    fiber.open_copies = fiber.incomplete_copies = 0;
    fiber.stack.prepare(fiber.context, entry);
  }
}

// The entry function of a fiber.
void Engine::entry() {
  Engine& e = *engine;
  begin_fiber(e.scheduler_);
  happened_after(e.launched_);
  e.launch_.kernel->run(e.launch_.params);
  e.require_no_copies();
  e.require_grid_wait();
  happened_before(e.ended_);
  Fiber& fiber = e.current();
  fiber.is_done = true;
  e.live_--;
  leave(fiber.context, e.scheduler_);
}

// Runs each warp as far as possible before the next one.
void Engine::run_threads() {
  while (live_ > 0 && error_.empty()) {
    if (launch_.seed != 0) shuffle_threads();
    bool any = false;
    for (u32 warp = 0; warp < threads_ / 32 && error_.empty(); warp++) {
      while (error_.empty() && run_warp(warp)) any = true;
    }
    if (any || !error_.empty()) continue;
    if (launch_.previous != nullptr) run_previous();
    else report_deadlock();
  }
  if (error_.empty()) return;
  for (u32 i = 0; i < threads_; i++) {
    if (!fibers_[i]->is_done) fibers_[i]->stack.abandon(fibers_[i]->context);
  }
}

// Runs each thread of the nth warp until it waits or ends. Returns false if none could run.
bool Engine::run_warp(u32 nth) {
  bool any = false;
  for (u32 i = nth * 32; i < nth * 32 + 32 && error_.empty(); i++) {
    Fiber& fiber = *fibers_[order_[i]];
    if (!can_run(fiber)) continue;
    any = true;
    current_ = order_[i];
    self = &fiber.thread;
    fiber.wait = Wait::Nothing;
    switch_context(scheduler_, fiber.context);
  }
  return any;
}

bool Engine::can_run(const Fiber& fiber) const {
  if (fiber.is_done) return false;
  if (fiber.wait == Wait::Barrier) return barrier_.generation != fiber.generation;
  if (fiber.wait == Wait::Grid) return launch_.previous == nullptr;
  return fiber.wait != Wait::Warp || warps_[fiber.thread.warp].generation != fiber.generation;
}

// Shuffles the warps, and the lanes of each.
void Engine::shuffle_threads() {
  const u32 warps = threads_ / 32;
  for (u32 i = warps; i > 1; i--) {
    const u32 other = random(i);
    std::swap_ranges(&order_[(i - 1) * 32], &order_[(i - 1) * 32] + 32, &order_[other * 32]);
  }
  for (u32 warp = 0; warp < warps; warp++) {
    for (u32 i = 32; i > 1; i--) std::swap(order_[warp * 32 + i - 1], order_[warp * 32 + random(i)]);
  }
}

void Engine::wait(Wait what, Site site, u32 generation) {
  Fiber& fiber = current();
  fiber.wait = what;
  fiber.site = site;
  fiber.generation = generation;
  happened_before(ended_);  // in case the fiber never returns
  switch_context(fiber.context, scheduler_);
}

void Engine::report(const char* text) {
  if (!error_.empty()) return;
  char begin[160];
  snprintf(begin, sizeof begin, "kernel %s, block (%u, %u, %u)", launch_.kernel->name, block_.index.x, block_.index.y,
           block_.index.z);
  error_ = std::string(begin) + text;
}

void Engine::fail(const char* format, ...) {
  char text[512];
  const int begin = snprintf(text, sizeof text, ", thread %u: ", current_);
  va_list list;
  va_start(list, format);
  vsnprintf(text + begin, sizeof text - size_t(begin), format, list);
  va_end(list);
  report(text);
  happened_before(ended_);
  leave(current().context, scheduler_);
}

void Engine::report_deadlock() {
  constexpr u32 SHOWN = 4;
  char line[256];
  snprintf(line, sizeof line, ": deadlock, %u of %u threads wait for others that never come", live_, threads_);
  std::string text = line;
  u32 shown = 0;
  for (u32 i = 0; i < threads_ && shown < SHOWN; i++) {
    const Fiber& fiber = *fibers_[i];
    if (fiber.is_done) continue;
    const char* what = fiber.wait == Wait::Barrier ? "kv_sync" : warps_[fiber.thread.warp].what.name;
    snprintf(line, sizeof line, "; thread %u in %s at %s:%d", i, what, fiber.site.file, fiber.site.line);
    text += line;
    shown++;
  }
  report(text.c_str());
}

u32 Engine::random(u32 below) {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 17;
  random_ ^= random_ << 5;
  return random_ % below;
}

}  // namespace kvemu

void kv_unknown_format(u32 format, kvemu::Site site) {
  kvemu::engine->fail("no stored format has the number %u, at %s:%d", format, site.file, site.line);
}
