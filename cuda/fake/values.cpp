// Stream memory operations, and holding a stream until a test lets it go.
#include <time.h>

#include "event.h"
#include "fault.h"
#include "memory.h"

using namespace kvferry::fake;

namespace {

// Polls `ready` until it holds; never for ever: a forgotten flag is an error, not a hang.
template <class Ready>
CUresult wait_until(Context& context, Ready ready) {
  const u64 end = now_nanoseconds() + u64(settings().hold_ms) * 1000000;
  for (;;) {
    bool done = false;
    KVF_TRY(ready(done));
    if (done) return CUDA_SUCCESS;
    if (now_nanoseconds() > end) return CUDA_ERROR_LAUNCH_TIMEOUT;
    if (context.error.load() != 0) return context.error.load();
    const timespec pause{0, 20000};
    nanosleep(&pause, nullptr);
  }
}

// Value waits compare as cuStreamWaitValue's manual says: GEQ cyclically.
template <class Word>
bool satisfied(Word now, Word value, unsigned how) {
  switch (how) {
    case 0:
      return std::make_signed_t<Word>(now - value) >= 0;
    case 1:
      return now == value;
    case 2:
      return (now & value) != 0;
    default:
      return Word(~(now | value)) != 0;
  }
}

template <class Word>
CUresult load_word(u64 address, Word& value) {
  if (!allocations().look(address, sizeof(Word)).whole) return CUDA_ERROR_ILLEGAL_ADDRESS;
  return guarded([&] { value = __atomic_load_n(reinterpret_cast<Word*>(bytes_of(address)), __ATOMIC_ACQUIRE); });
}

template <class Word>
CUresult find_word(CUstream on, u64 address, std::shared_ptr<Stream>& stream) {
  KVF_TRY(resolve(on, stream));
  const bool good = address % sizeof(Word) == 0 && allocations().look(address, sizeof(Word)).whole;
  return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

template <class Word>
CUresult wait_value(CUstream on, u64 address, Word value, unsigned flags) {
  std::shared_ptr<Stream> stream;
  KVF_TRY(find_word<Word>(on, address, stream));
  const unsigned how = flags & 3;
  if ((flags & ~(3u | 1u << 30)) != 0) return CUDA_ERROR_INVALID_VALUE;
  Context* const context = &stream->context();
  const auto run = [=] {
    return wait_until(*context, [&](bool& done) -> CUresult {
      Word now{};
      KVF_TRY(load_word(address, now));
      done = satisfied(now, value, how);
      return CUDA_SUCCESS;
    });
  };
  return submit(stream, {context, kBatchMemOpNode, run});
}

template <class Word>
CUresult write_value(CUstream on, u64 address, Word value, unsigned flags) {
  std::shared_ptr<Stream> stream;
  KVF_TRY(find_word<Word>(on, address, stream));
  if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
  const auto run = [=]() -> CUresult {
    if (!allocations().look(address, sizeof(Word)).whole) return CUDA_ERROR_ILLEGAL_ADDRESS;
    return guarded([&] { __atomic_store_n(reinterpret_cast<Word*>(bytes_of(address)), value, __ATOMIC_RELEASE); });
  };
  return submit(stream, {&stream->context(), kBatchMemOpNode, run});
}

}  // namespace

KVF_API cuStreamWaitValue32_v2(CUstream on, CUdeviceptr address, u32 value, unsigned flags) {
  return wait_value<u32>(on, address, value, flags);
}
KVF_API cuStreamWaitValue64_v2(CUstream on, CUdeviceptr address, u64 value, unsigned flags) {
  return wait_value<u64>(on, address, value, flags);
}
KVF_API cuStreamWriteValue32_v2(CUstream on, CUdeviceptr address, u32 value, unsigned flags) {
  return write_value<u32>(on, address, value, flags);
}
KVF_API cuStreamWriteValue64_v2(CUstream on, CUdeviceptr address, u64 value, unsigned flags) {
  return write_value<u64>(on, address, value, flags);
}

// Not CUDA's: the stream waits until the u32 at `flag`, anywhere in host memory, is not 0.
KVF_API kvferryFakeHold(CUstream on, const u32* flag) {
  if (flag == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(on, stream));
  Context* const held = &stream->context();
  const auto run = [=] {
    return wait_until(*held, [&](bool& done) -> CUresult {
      done = __atomic_load_n(flag, __ATOMIC_ACQUIRE) != 0;
      return CUDA_SUCCESS;
    });
  };
  return submit(stream, {held, kHostNode, run});
}

// Not CUDA's: when the stream gets there, its context fails with `error`, as after a kernel that went wrong.
KVF_API kvferryFakeFail(CUstream on, CUresult error) {
  if (error == CUDA_SUCCESS) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(on, stream));
  return submit(stream, {&stream->context(), kKernelNode, [error] { return error; }});
}

// Not CUDA's: how many objects of a kind exist, for tests that count leaks. ~0 for a kind that is not known.
extern "C" __attribute__((visibility("default"))) u64 kvferryFakeLive(const char* kind) {
  const std::string name = kind == nullptr ? "" : kind;
  if (name == "streams") return streams().size();
  if (name == "events") return events().size();
  if (name == "graphs") return graphs().size();
  if (name == "device") return allocations().count(Kind::kDevice);
  if (name == "pinned") return allocations().count(Kind::kPinned);
  if (name == "registered") return allocations().count(Kind::kRegistered);
  if (name == "mapped") return allocations().count(Kind::kMapped);
  if (name == "opened") return allocations().count(Kind::kOpened);
  return ~u64(0);
}
