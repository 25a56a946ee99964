// Exports of the library: kernels by name, and the sizes of their parameters.
#include <cstdio>
#include <cstdlib>

#include "../prefill_plan.h"
#include "engine.h"

#define KV_EXPORT extern "C" __attribute__((visibility("default")))

namespace kvemu {
namespace {

const Kernel* registered = nullptr;

constexpr u32 PARAMS_BYTES_MAX = 4096;     // of a kernel on every GPU
constexpr u32 THREADS_MAX = 1024;          // of a block
constexpr u32 SHARED_BYTES_MAX = 232448;   // of a block on sm_90
constexpr u32 GRID_YZ_MAX = 65535;

struct Size {
  const char* name;
  u32 bytes;
};
#define KV_SIZE(Struct) {#Struct, sizeof(Struct)}
constexpr Size SIZES[] = {
    KV_SIZE(KvTensor),       KV_SIZE(KvPlane),       KV_SIZE(KvSequence),     KV_SIZE(KvSplit),
    KV_SIZE(KvCounts),       KV_SIZE(KvPlan),        KV_SIZE(KvTableParams),  KV_SIZE(KvWriteParams),
    KV_SIZE(KvAttendParams), KV_SIZE(KvRange),       KV_SIZE(KvGatherParams), KV_SIZE(KvBlockCopy),
    KV_SIZE(KvCopyParams),   KV_SIZE(KvEntry),       KV_SIZE(KvConvertParams), KV_SIZE(KvPadParams),
    KV_SIZE(KvTableChange),  KV_SIZE(KvWorkItem),       KV_SIZE(KvDecodePlanParams), KV_SIZE(KvDecodeParams),
    KV_SIZE(KvPrefillPlanParams), KV_SIZE(KvPrefillParams), KV_SIZE(KvStoredParams),
};

// Returns why the launch is refused; empty if it is not.
std::string check(const char* name, const Launch& launch, u32 threads, u32 params_bytes) {
  const Kernel* kernel = launch.kernel;
  char text[256] = "";
  if (kernel == nullptr) {
    snprintf(text, sizeof text, "no kernel is named %s", name);
  } else if (threads != kernel->threads) {
    snprintf(text, sizeof text, "kernel %s has %u threads a block, not %u", name, kernel->threads, threads);
  } else if (threads == 0 || threads % 32 != 0 || threads > THREADS_MAX) {
    snprintf(text, sizeof text, "kernel %s: %u threads are not whole warps of one block", name, threads);
  } else if (params_bytes != kernel->params_bytes || params_bytes > PARAMS_BYTES_MAX) {
    snprintf(text, sizeof text, "kernel %s takes %u bytes of parameters, not %u", name, kernel->params_bytes,
             params_bytes);
  } else if (launch.shared_bytes > SHARED_BYTES_MAX) {
    snprintf(text, sizeof text, "kernel %s: %u bytes of shared memory, %u are possible", name, launch.shared_bytes,
             SHARED_BYTES_MAX);
  } else if (launch.grid.x == 0 || launch.grid.x > 0x7fffffffu || launch.grid.y == 0 || launch.grid.y > GRID_YZ_MAX ||
             launch.grid.z == 0 || launch.grid.z > GRID_YZ_MAX) {
    snprintf(text, sizeof text, "kernel %s: no grid has %u x %u x %u blocks", name, launch.grid.x, launch.grid.y,
             launch.grid.z);
  }
  return text;
}

const Kernel* find(const char* name) {
  for (const Kernel* kernel = registered; kernel != nullptr; kernel = kernel->next) {
    if (std::strcmp(kernel->name, name) == 0) return kernel;
  }
  return nullptr;
}

// Names a file to which a line `LAUNCHES KERNEL` is added for every kernel when the program ends.
// It shows which kernels a set of tests never ran.
constexpr const char* LAUNCHES_FILE = "KV_EMU_LAUNCHES";

struct Report {
  ~Report() {
    const char* path = std::getenv(LAUNCHES_FILE);
    FILE* file = path == nullptr ? nullptr : std::fopen(path, "a");
    if (file == nullptr) return;
    std::setvbuf(file, nullptr, _IOFBF, 1 << 16);  // at once, so that lines of several programs stay whole
    for (const Kernel* kernel = registered; kernel != nullptr; kernel = kernel->next) {
      fprintf(file, "%llu %s\n", (unsigned long long)kernel->launches.load(), kernel->name);
    }
    std::fclose(file);
  }
} at_exit;

}  // namespace

Kernel::Kernel(const char* name, size_t params_bytes, u32 threads, void (*run)(const void*))
    : name(name), params_bytes(u32(params_bytes)), threads(threads), run(run), next(registered) {
  registered = this;
}

}  // namespace kvemu

// A launch. With `seed` 0, blocks and threads run in order; other seeds shuffle them.
struct KvEmuLaunch {
  const char* name;
  const void* params;
  u32 grid[3];
  u32 threads, shared_bytes, params_bytes, seed;
};

// Runs kernels one after another, to their ends. Each may begin before the previous one has run, and
// waits for it in kv_grid_wait. Returns 0 on success; otherwise `error` holds the reason, cut to
// `error_bytes` with the final zero. May be called by several threads.
KV_EXPORT int kv_emu_launch_chain(const KvEmuLaunch* all, u32 count, char* error, u32 error_bytes) {
  // Like the driver: the caller's bytes need no alignment and may be freed after the call.
  struct alignas(16) Params { u8 bytes[kvemu::PARAMS_BYTES_MAX]; };
  std::vector<Params> copies(count);
  std::vector<kvemu::Launch> launches(count);
  std::string text;
  for (u32 i = 0; i < count && text.empty(); i++) {
    const KvEmuLaunch& from = all[i];
    launches[i] = {kvemu::find(from.name), {from.grid[0], from.grid[1], from.grid[2]}, from.shared_bytes,
                   copies[i].bytes, from.seed, i > 0 ? &launches[i - 1] : nullptr};
    text = kvemu::check(from.name, launches[i], from.threads, from.params_bytes);
    if (text.empty()) std::memcpy(copies[i].bytes, from.params, from.params_bytes);
  }
  if (text.empty() && count > 0) text = kvemu::run(launches.back());
  if (text.empty()) return 0;
  if (error_bytes > 0) snprintf(error, error_bytes, "%s", text.c_str());
  return 1;
}

KV_EXPORT int kv_emu_launch(const char* name, const u32 grid[3], u32 threads, u32 shared_bytes, const void* params,
                            u32 params_bytes, u32 seed, char* error, u32 error_bytes) {
  const KvEmuLaunch launch = {name, params, {grid[0], grid[1], grid[2]}, threads, shared_bytes, params_bytes, seed};
  return kv_emu_launch_chain(&launch, 1, error, error_bytes);
}

// Returns the number of kernels; writes the names of the first `max` to `names`, which may be null
// if `max` is 0.
KV_EXPORT u32 kv_emu_kernels(const char** names, u32 max) {
  u32 count = 0;
  for (const kvemu::Kernel* kernel = kvemu::registered; kernel != nullptr; kernel = kernel->next, count++) {
    if (count < max) names[count] = kernel->name;
  }
  return count;
}

// Returns the bytes of a structure of params.h, 0 for an unknown name.
KV_EXPORT u32 kv_emu_sizeof(const char* struct_name) {
  for (const kvemu::Size& size : kvemu::SIZES) {
    if (std::strcmp(size.name, struct_name) == 0) return size.bytes;
  }
  return 0;
}
