// Dependent launches: a kernel that may begin before the kernel before it has ended.
//
// The first thread block of such a launch runs as far as it can, to kv_grid_wait in every thread;
// then the previous launch runs, in an engine of its own, from its first thread block to its last;
// then this launch goes on. What a kernel reads before its wait is therefore as it was before the
// previous launch, and what it writes there is what the previous launch finds. ThreadSanitizer
// reports both as races. A kernel that never waits is an error in every launch: the next kernel
// would wait for it alone.
#include <exception>

#include "engine.h"
#include "sanitizer.h"

namespace kvemu {

std::string run(const Launch& launch) {
  launch.kernel->launches++;
  Engine* const around = engine;
  Engine* const own = take_engine();
  engine = own;
  std::string error;
  try {
    error = own->run(launch);
  } catch (const std::exception& exception) {
    error = std::string("the emulator: ") + exception.what();
  }
  give_engine(own);
  engine = around;
  self = nullptr;
  return error;
}

void Engine::grid_wait(Site site) {
  current().has_waited = true;
  if (launch_.previous != nullptr) wait(Wait::Grid, site, 0);
  happened_after(previous_ended_);
}

// Runs the previous launch, when no thread can go on without it.
void Engine::run_previous() {
  error_ = kvemu::run(*launch_.previous);
  launch_.previous = nullptr;
  happened_before(previous_ended_);
}

void Engine::require_grid_wait() {
  if (!current().has_waited) fail("it ends without kv_grid_wait");
}

void grid_wait(Site site) { engine->grid_wait(site); }

}  // namespace kvemu
