// Asynchronous copies to shared memory. They complete as late as possible, when their group is
// waited for, and until then the destination reads as NaN: a kernel that reads too early is wrong
// at once.
#include "engine.h"
#include "sanitizer.h"

namespace kvemu {

void copy_async(void* to, const void* from, u32 bytes, u32 valid, Site site) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 != 0) {
    engine->fail("kv_cp_async16 at %s:%d: %p or %p is not a multiple of 16", site.file, site.line, to, from);
  }
  writes(to, bytes);
  fill_bytes(to, 0xff, bytes);
  Fiber& fiber = engine->current();
  fiber.copies.push_back({to, from, bytes, valid});
  fiber.open_copies++;
}

void copy_commit() {
  Fiber& fiber = engine->current();
  fiber.groups.push_back(fiber.open_copies);
  fiber.open_copies = 0;
}

void copy_wait(u32 keep) {
  Fiber& fiber = engine->current();
  size_t groups = 0, copies = 0;
  for (; fiber.groups.size() - groups > keep; groups++) copies += fiber.groups[groups];
  for (size_t i = 0; i < copies; i++) {
    const PendingCopy& copy = fiber.copies[i];
    reads(copy.from, copy.valid);
    writes(copy.to, copy.bytes);
    copy_bytes(copy.to, copy.from, copy.valid);
    fill_bytes(static_cast<u8*>(copy.to) + copy.valid, 0, copy.bytes - copy.valid);
  }
  fiber.groups.erase(fiber.groups.begin(), fiber.groups.begin() + std::ptrdiff_t(groups));
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + std::ptrdiff_t(copies));
}

}  // namespace kvemu
