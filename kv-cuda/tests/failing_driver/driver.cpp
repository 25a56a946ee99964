// A driver library with one device that runs nothing: device memory is host memory, copies are done
// at once, kernels do nothing. One of its functions fails as KV_TEST_FAULT says: `NAME CALL CODE`,
// from its CALL-th call on. A code of 700 or more is sticky: from then on every function returns
// it, as a driver does once a context is broken. What is submitted to which stream is written to the
// file that KV_TEST_LOG names: `launch STREAM 0`, `dependent STREAM 0` for a launch that may begin
// before the previous one has ended, `record STREAM EVENT`, `wait STREAM EVENT`, `synchronize EVENT 0`.
// With KV_TEST_PTX it loads no machine code. Compiled with KV_TEST_LAUNCH_EX it has cuLaunchKernelEx.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct Fault {
  char name[64] = "";
  int call = 0, code = 0;
  std::atomic<int> calls{0};
  std::atomic<bool> stays{false};
  Fault() {
    const char* text = std::getenv("KV_TEST_FAULT");
    if (text) std::sscanf(text, "%63s %d %d", name, &call, &code);
  }
};
Fault fault;

int outcome(const char* name) {
  if (fault.stays) return fault.code;
  if (std::strcmp(name, fault.name) != 0 || ++fault.calls < fault.call) return 0;
  fault.stays = fault.code >= 700;
  return fault.code;
}

void note(const char* what, const void* first, const void* second = nullptr) {
  static const char* const path = std::getenv("KV_TEST_LOG");
  if (!path) return;
  if (std::FILE* log = std::fopen(path, "a")) {
    const auto number = [](const void* handle) { return (unsigned long long)(uintptr_t(handle)); };
    std::fprintf(log, "%s %llu %llu\n", what, number(first), number(second));
    std::fclose(log);
  }
}

thread_local void* current = nullptr;
int handle;  // what every handle points to, but those of events
std::atomic<unsigned long long> events{0};

typedef unsigned long long Address;
typedef void* Handle;

int give(Address* to, size_t bytes) {
  // Far more than this test uses is available on a real card.
  void* memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  if (!memory) return 2;
  std::memset(memory, 0, bytes);
  *to = Address(reinterpret_cast<uintptr_t>(memory));
  return 0;
}
void* at(Address address) { return reinterpret_cast<void*>(uintptr_t(address)); }

}  // namespace

#define API(name, args, ...)                            \
  extern "C" int name args {                            \
    if (const int code = outcome(#name)) return code;   \
    __VA_ARGS__                                         \
    return 0;                                           \
  }

API(cuInit, (unsigned))
API(cuDriverGetVersion, (int* v), *v = 13000;)
API(cuDeviceGetCount, (int* n), *n = 1;)
API(cuDeviceGet, (int* d, int), *d = 0;)
API(cuDeviceGetName, (char* name, int room, int), std::snprintf(name, size_t(room), "NVIDIA H100 (not really)");)
API(cuDeviceTotalMem_v2, (size_t* bytes, int), *bytes = size_t(1) << 34;)
// Compute capability 9.0, 132 multiprocessors, 227 KB of shared memory, no memory pools.
API(cuDeviceGetAttribute, (int* v, int which, int),
    *v = which == 75 ? 9 : which == 76 ? 0 : which == 16 ? 132 : which == 97 ? 232448 : 0;)
API(cuDevicePrimaryCtxRetain, (Handle* c, int), *c = &handle;)
API(cuDevicePrimaryCtxRelease_v2, (int))
API(cuCtxGetCurrent, (Handle* c), *c = current;)
API(cuCtxPushCurrent_v2, (Handle c), current = c;)
API(cuCtxPopCurrent_v2, (Handle* c), *c = current; current = nullptr;)
API(cuCtxSynchronize, (), note("finish", nullptr);)
API(cuMemAlloc_v2, (Address* to, size_t bytes), return give(to, bytes);)
API(cuMemFree_v2, (Address a), note("free", at(a)); std::free(at(a));)
API(cuMemHostAlloc, (Handle* to, size_t bytes, unsigned), Address a; if (give(&a, bytes)) return 2; *to = at(a);)
API(cuMemFreeHost, (Handle p), std::free(p);)
API(cuMemsetD8Async, (Address a, unsigned char v, size_t n, Handle), std::memset(at(a), v, n);)
API(cuMemcpyHtoDAsync_v2, (Address to, const void* from, size_t n, Handle), std::memcpy(at(to), from, n);)
API(cuMemcpyDtoHAsync_v2, (void* to, Address from, size_t n, Handle), std::memcpy(to, at(from), n);)
API(cuMemcpyDtoDAsync_v2, (Address to, Address from, size_t n, Handle), std::memmove(at(to), at(from), n);)
// Refuses what a driver of NVIDIA crashes with: too many copies.
API(cuMemcpyBatchAsync_v2, (Address* to, Address* from, size_t* sizes, size_t n, void*, size_t*, size_t, Handle),
    if (n > 4096) return 1;
    for (size_t i = 0; i < n; i++) std::memcpy(at(to[i]), at(from[i]), sizes[i]);)
API(cuPointerGetAttribute, (void* v, int, Address), *static_cast<int*>(v) = 0;)
API(cuMemGetAddressRange_v2, (Address* base, size_t* n, Address a), *base = a; *n = size_t(1) << 20;)
API(cuStreamCreate, (Handle* s, unsigned), *s = &handle;)
API(cuStreamDestroy_v2, (Handle))
API(cuStreamSynchronize, (Handle))
API(cuStreamWaitEvent, (Handle s, Handle e, unsigned), note("wait", s, e);)
API(cuStreamGetCtx, (Handle, Handle* c), *c = &handle;)
API(cuStreamBeginCapture_v2, (Handle, int))
API(cuStreamEndCapture, (Handle, Handle* g), *g = &handle;)
API(cuStreamIsCapturing, (Handle, int* status), *status = 0;)
API(cuThreadExchangeStreamCaptureMode, (int*))
API(cuGraphInstantiateWithFlags, (Handle* e, Handle, unsigned long long), *e = &handle;)
API(cuGraphDestroy, (Handle))
API(cuGraphExecDestroy, (Handle))
API(cuGraphLaunch, (Handle, Handle))
API(cuGraphUpload, (Handle, Handle))
API(cuEventCreate, (Handle* e, unsigned), *e = at(++events);)
API(cuEventDestroy_v2, (Handle))
API(cuEventRecord, (Handle e, Handle s), note("record", s, e);)
API(cuEventQuery, (Handle))
API(cuEventSynchronize, (Handle e), note("synchronize", e);)
API(cuModuleLoadDataEx, (Handle* m, const void* image, unsigned, int*, Handle*),
    if (std::getenv("KV_TEST_PTX") && std::memcmp(image, "\x7f" "ELF", 4) == 0) return 209;
    *m = &handle;)
API(cuModuleUnload, (Handle))
API(cuModuleGetFunction, (Handle* f, Handle, const char*), *f = &handle;)
API(cuFuncGetAttribute, (int* v, int, Handle), *v = 0;)
API(cuFuncSetAttribute, (Handle, int, int))
API(cuLaunchKernel, (Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle s, Handle*, Handle*), note("launch", s);)
#ifdef KV_TEST_LAUNCH_EX
struct Attribute { unsigned id, pad; int value, rest[15]; };
struct Config { unsigned grid[3], threads[3], shared_bytes; Handle stream; const Attribute* attributes; unsigned count; };
// The only attribute that it takes: programmatic stream serialisation.
API(cuLaunchKernelEx, (const Config* c, Handle, Handle*, Handle*),
    if (c->count != 1 || c->attributes->id != 6 || c->attributes->value != 1) return 1;
    note("dependent", c->stream);)
#endif
extern "C" int cuGetErrorString(int, const char** text) {
  *text = "a fault of the test";
  return 0;
}
