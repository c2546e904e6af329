// The self-test of the simulated driver. Runs against whatever libcuda.so.1 is found first; on a real driver the parts
// that need simulated kernels are left out, and every line printed is a difference to look into.
#include <dlfcn.h>

#include <chrono>
#include <cstdlib>

#include "driver.hpp"

namespace selftest {

Driver cu;

namespace {
std::atomic<int> failures{0};
}

void expect(bool holds, const char* file, int line, const std::string& what) {
  if (holds) return;
  failures += 1;
  const char* slash = std::strrchr(file, '/');
  std::fprintf(stderr, "%s:%d: %s\n", slash == nullptr ? file : slash + 1, line, what.c_str());
}

std::string name_of(CUresult result) {
  const char* name = nullptr;
  cu.cuGetErrorName(result, &name);
  return (name == nullptr ? "?" : std::string(name)) + " (" + std::to_string(result) + ")";
}

Gate::Gate() {
  void* word = nullptr;
  OK(cu.cuMemHostAlloc(&word, sizeof(u32), 3));
  word_ = static_cast<u32*>(word);
}

Gate::~Gate() {
  open();
  OK(cu.cuMemFreeHost(word_));
}

void Gate::close(CUstream stream) {
  __atomic_store_n(word_, 0, __ATOMIC_RELEASE);
  OK(cu.cuStreamWaitValue32_v2(stream, reinterpret_cast<CUdeviceptr>(word_), 1, 1));
}

void Gate::open() { __atomic_store_n(word_, 1, __ATOMIC_RELEASE); }

}  // namespace selftest

using namespace selftest;

int main(int argc, char** argv) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
#define SELFTEST_LOAD(name, arguments)                                      \
  cu.name = reinterpret_cast<CUresult(*) arguments>(dlsym(library, #name)); \
  if (cu.name == nullptr) std::fprintf(stderr, "no %s\n", #name);
  SELFTEST_CALLS(SELFTEST_LOAD)
#undef SELFTEST_LOAD
  cu.kvferryFakeHold = reinterpret_cast<CUresult (*)(CUstream, const u32*)>(dlsym(library, "kvferryFakeHold"));
  cu.kvferryFakeLive = reinterpret_cast<u64 (*)(const char*)>(dlsym(library, "kvferryFakeLive"));
  cu.simulated = cu.kvferryFakeHold != nullptr;
  if (argc > 1 && std::strcmp(argv[1], "crash") == 0) return crash_child();
  if (argc > 1) return share_child(argc, argv);

  const auto begin = std::chrono::steady_clock::now();
  int count = 0;
  IS(cu.cuDeviceGetCount(&count), CUDA_ERROR_NOT_INITIALIZED);
  OK(cu.cuInit(0));
  OK(cu.cuDeviceGetCount(&count));
  size_t free_bytes = 0, total = 0;
  IS(cu.cuMemGetInfo_v2(&free_bytes, &total), CUDA_ERROR_INVALID_CONTEXT);
  CUcontext context = nullptr;
  OK(cu.cuDevicePrimaryCtxRetain(&context, 0));
  OK(cu.cuCtxSetCurrent(context));
  memory_tests();
  stream_tests();
  capture_tests();
  if (cu.simulated) kernel_tests();
  if (cu.simulated && count > 1) exchange_tests();
  share_tests(argv[0]);
  if (cu.simulated) {
    for (const char* kind : {"streams", "events", "graphs", "device", "pinned", "registered", "mapped", "opened"}) {
      expect(cu.kvferryFakeLive(kind) == 0, __FILE__, __LINE__, std::string("left behind: ") + kind);
    }
  }
  failure_tests(argv[0]);  // last: contexts do not recover
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::fprintf(stderr, "selftest: %d differences, %.1f s, %s driver\n", failures.load(), took.count(),
               cu.simulated ? "simulated" : "real");
  return failures.load() == 0 ? 0 : 1;
}
