// Fibers: stacks and the switch between them, with annotations for sanitizers.
#pragma once
#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__) && !defined(KV_EMU_UCONTEXT)
#define KV_EMU_UCONTEXT 1  // slower by a system call a switch, but on every CPU
#endif
#ifdef KV_EMU_UCONTEXT
#include <ucontext.h>
#endif

namespace kvemu {

// Where a fiber, or the scheduler, continues.
struct Context {
#ifdef KV_EMU_UCONTEXT
  ucontext_t saved;
#else
  void* stack_pointer = nullptr;
#endif
  // The stack, for AddressSanitizer; the scheduler's is found when a fiber begins.
  const void* bottom = nullptr;
  size_t bytes = 0;
  void* fake_stack = nullptr;
  void* tsan_fiber = nullptr;
};

// The stack of a fiber, kept between launches: allocating one costs more than running a block of
// threads.
class Stack {
 public:
  Stack();  // throws std::bad_alloc
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  // Prepares `context` to run `entry` on this stack. `entry` never returns: it ends with `leave`.
  void prepare(Context& context, void (*entry)());
  // Frees a fiber that was abandoned before its end.
  void abandon(Context& context);

 private:
  uint8_t* begin_;
  size_t bytes_;
};

void enter_scheduler(Context& scheduler);                // before a launch's first switch
void begin_fiber(Context& scheduler);                    // first thing in a fiber
void switch_context(Context& from, Context& to);         // returns when `from` is resumed
[[noreturn]] void leave(Context& from, Context& to);     // `from` ends here

}  // namespace kvemu
