// Asynchronous copies to shared memory.
//
// A copy is in flight from its issue to the wait for its group. The hardware may carry it out at any
// time between. With a seed, the emulator chooses a synchronisation point of the issuing thread at
// random; without one, it is the wait. No wait covers a copy that was never committed.
//
// The bytes of a copy in flight belong to it. Until it is carried out they read as NaN, so that a
// kernel that reads too early is wrong at once. What the emulator reports:
//   - a write to them, when the copy is carried out or waited for: they have changed;
//   - a read of them, by functions that the emulator implements; with AddressSanitizer, every access;
//   - another copy to them;
//   - a thread that ends before it has waited.
#include "engine.h"
#include "sanitizer.h"

namespace kvemu {

namespace {
constexpr u8 UNWRITTEN = 0xff;
}

void Engine::start_copy(void* to, const void* from, u32 valid, Site site) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % COPY_BYTES != 0) {
    fail("kv_cp_async16 at %s:%d: %p or %p is not a multiple of 16", site.file, site.line, to, from);
  }
  if (!is_shared(to, COPY_BYTES)) {
    fail("kv_cp_async16 at %s:%d: %p is not in the %u bytes of shared memory", site.file, site.line, to,
         launch_.shared_bytes);
  }
  if (is_in_flight(to)) {
    const Site other = copy_to(to).site;
    fail("kv_cp_async16 at %s:%d copies to the same bytes as the copy at %s:%d, which is in flight", site.file,
         site.line, other.file, other.line);
  }
  writes(to, COPY_BYTES);
  fill_bytes(to, UNWRITTEN, COPY_BYTES);
  set_in_flight(to, true);
  Fiber& fiber = current();
  fiber.copies.push_back({to, from, valid, site, false, {}});
  fiber.open_copies++;
  fiber.incomplete_copies++;
}

void Engine::commit_copies() {
  Fiber& fiber = current();
  fiber.groups.push_back(fiber.open_copies);
  fiber.open_copies = 0;
}

void Engine::wait_for_copies(u32 keep) {
  advance_copies();
  Fiber& fiber = current();
  size_t groups = 0, copies = 0;
  for (; fiber.groups.size() - groups > keep; groups++) copies += fiber.groups[groups];
  for (size_t i = 0; i < copies; i++) {
    PendingCopy& copy = fiber.copies[i];
    if (!copy.is_complete) complete(copy);
    else report_copy(copy);
    set_in_flight(copy.to, false);
    if (!same_bytes(copy.to, copy.data, COPY_BYTES)) fail_written(copy);
  }
  fiber.groups.erase(fiber.groups.begin(), fiber.groups.begin() + std::ptrdiff_t(groups));
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + std::ptrdiff_t(copies));
}

// Carries out about half of the copies that wait for it.
void Engine::complete_some() {
  Fiber& fiber = current();
  for (PendingCopy& copy : fiber.copies) {
    if (!copy.is_complete && random(2) == 0) complete(copy);
  }
}

void Engine::complete(PendingCopy& copy) {
  set_in_flight(copy.to, false);  // this access is the copy's own
  u8 expected[COPY_BYTES];
  fill_bytes(expected, UNWRITTEN, COPY_BYTES);
  if (!same_bytes(copy.to, expected, COPY_BYTES)) fail_written(copy);
  report_copy(copy);
  fill_bytes(copy.data, 0, COPY_BYTES);
  copy_bytes(copy.data, copy.from, copy.valid);
  copy_bytes(copy.to, copy.data, COPY_BYTES);
  set_in_flight(copy.to, true);
  copy.is_complete = true;
  current().incomplete_copies--;
}

// Reports the accesses of a copy to ThreadSanitizer: of one that was carried out early once more
// when it is waited for, since any access before that is a race.
void Engine::report_copy(const PendingCopy& copy) {
  reads(copy.from, copy.valid);
  writes(copy.to, COPY_BYTES);
}

void Engine::require_no_copies() {
  const Fiber& fiber = current();
  if (fiber.copies.empty()) return;
  const PendingCopy& copy = fiber.copies[0];
  const bool is_committed = fiber.copies.size() > fiber.open_copies;
  fail("it ends while the copy of kv_cp_async16 at %s:%d is in flight: %s", copy.site.file, copy.site.line,
       is_committed ? "its group was not waited for" : "no kv_cp_commit follows it, so no wait covers it");
}

void Engine::require_readable(const void* at, u32 bytes, const char* what, Site site) {
#ifndef KV_EMU_TSAN  // it finds the race, and says more about it
  const u8* begin = static_cast<const u8*>(at);
  if (!is_shared(at, bytes) || (!is_in_flight(begin) && !is_in_flight(begin + bytes - 1))) return;
  const Site copy = copy_to(is_in_flight(begin) ? begin : begin + bytes - 1).site;
  fail("%s at %s:%d reads bytes of the copy at %s:%d, which is in flight", what, site.file, site.line, copy.file,
       copy.line);
#else
  (void)at, (void)bytes, (void)what, (void)site;
#endif
}

void Engine::fail_written(const PendingCopy& copy) {
  fail("bytes of the copy of kv_cp_async16 at %s:%d were written while it was in flight", copy.site.file,
       copy.site.line);
}

bool Engine::is_shared(const void* at, u32 bytes) const {
  const uintptr_t offset = reinterpret_cast<uintptr_t>(at) - reinterpret_cast<uintptr_t>(shared_);
  return offset < launch_.shared_bytes && bytes <= launch_.shared_bytes - offset;
}

void Engine::set_in_flight(void* at, bool is_in_flight) {
  in_flight_[size_t(static_cast<u8*>(at) - shared_) / COPY_BYTES] = is_in_flight;
  if (is_in_flight) forbid_access(at, COPY_BYTES);
  else allow_access(at, COPY_BYTES);
}

// Returns the copy in flight to these bytes.
const PendingCopy& Engine::copy_to(const void* at) const {
  const u8* const byte = static_cast<const u8*>(at);
  for (u32 i = 0; i < threads_; i++) {
    for (const PendingCopy& copy : fibers_[i]->copies) {
      const u8* const to = static_cast<const u8*>(copy.to);
      if (byte >= to && byte < to + COPY_BYTES) return copy;
    }
  }
  std::abort();  // is_in_flight says that there is one
}

void copy_async(void* to, const void* from, u32 valid, Site site) { engine->start_copy(to, from, valid, site); }
void copy_commit() { engine->commit_copies(); }
void copy_wait(u32 keep) { engine->wait_for_copies(keep); }
void shared_read(u32 at, u32 bytes, const char* what, Site site) {
  engine->require_readable(engine->shared() + at, bytes, what, site);
}

}  // namespace kvemu
