// Stacks and switches. A switch saves only the registers that a call preserves: kernels change
// neither floating-point modes nor signal masks.
#include "fiber.h"

#include <atomic>
#include <cstdlib>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

#include "sanitizer.h"

namespace kvemu {

namespace {
constexpr size_t STACK_BYTES = 256 * 1024;

// Bytes that a stack leaves unused at its top, different for the lanes of a warp. Tops at the same
// offset of a page would all lie in the same few sets of the L1 cache, and each switch would miss.
size_t unused_at_top() {
  static std::atomic<size_t> stacks{0};
  return stacks++ % 32 * 128;
}
}

#ifndef KV_EMU_UCONTEXT
extern "C" void kv_emu_switch(void** save, void* to);
asm(R"(
.text
.globl kv_emu_switch
.hidden kv_emu_switch
.type kv_emu_switch,@function
kv_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kv_emu_switch,.-kv_emu_switch
)");
#endif

Stack::Stack() : bytes_(STACK_BYTES - unused_at_top()) {
  // The page below the stack is inaccessible: a kernel that overflows its stack stops there.
  const size_t guard = size_t(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, guard + STACK_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  begin_ = static_cast<uint8_t*>(memory) + guard;
  if (mprotect(begin_, STACK_BYTES, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
}

void Stack::prepare(Context& context, void (*entry)()) {
  context.bottom = begin_;
  context.bytes = bytes_;
  context.fake_stack = nullptr;
#ifdef KV_EMU_TSAN
  if (context.tsan_fiber == nullptr) context.tsan_fiber = __tsan_create_fiber(0);
#endif
#ifdef KV_EMU_UCONTEXT
  getcontext(&context.saved);
  context.saved.uc_stack.ss_sp = begin_;
  context.saved.uc_stack.ss_size = bytes_;
  context.saved.uc_link = nullptr;
  makecontext(&context.saved, entry, 0);
#else
  // As if `entry`, called from address 0, had called kv_emu_switch at its first instruction.
  uint64_t* top = reinterpret_cast<uint64_t*>(begin_ + bytes_);
  *--top = 0;
  *--top = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; i++) *--top = 0;
  context.stack_pointer = top;
#endif
}

void Stack::abandon(Context& context) {
  (void)context;
#ifdef KV_EMU_TSAN
  __tsan_destroy_fiber(context.tsan_fiber);  // it still counts the functions that were abandoned
  context.tsan_fiber = nullptr;
#endif
#ifdef KV_EMU_ASAN
  __asan_unpoison_memory_region(begin_, bytes_);  // the abandoned functions do not do it
#endif
}

void enter_scheduler(Context& scheduler) {
  (void)scheduler;
#ifdef KV_EMU_TSAN
  scheduler.tsan_fiber = __tsan_get_current_fiber();
#endif
}

void begin_fiber(Context& scheduler) {
  (void)scheduler;
#ifdef KV_EMU_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &scheduler.bottom, &scheduler.bytes);
#endif
}

static void swap_contexts(Context& from, Context& to) {
#ifdef KV_EMU_TSAN
  __tsan_switch_to_fiber(to.tsan_fiber, 1);  // 1: a switch orders nothing; only barriers do
#endif
#ifdef KV_EMU_UCONTEXT
  swapcontext(&from.saved, &to.saved);
#else
  kv_emu_switch(&from.stack_pointer, to.stack_pointer);
#endif
}

void switch_context(Context& from, Context& to) {
#ifdef KV_EMU_ASAN
  __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.bytes);
#endif
  swap_contexts(from, to);
#ifdef KV_EMU_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void leave(Context& from, Context& to) {
#ifdef KV_EMU_ASAN
  __sanitizer_start_switch_fiber(nullptr, to.bottom, to.bytes);
#endif
  swap_contexts(from, to);
  std::abort();  // a fiber that ended is never resumed
}

}  // namespace kvemu
