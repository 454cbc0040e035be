// Streams that wait for a word of memory, which the program or another stream writes, and the
// streams that write one.
#include <chrono>
#include <unordered_map>

#include "capture.h"
#include "entry.h"
#include "work.h"

using namespace softcuda;  // NOLINT

namespace {

// The clock of the stream that wrote the word, at that time.
std::unordered_map<const std::uint32_t*, Clock>& writers() {
  static auto* instance = new std::unordered_map<const std::uint32_t*, Clock>;
  return *instance;
}

// In any memory that the driver knows.
std::uint32_t* word_at(CUdeviceptr ptr) {
  Allocation found;
  const bool valid = ptr % sizeof(std::uint32_t) == 0 && find_allocation(ptr, found);
  return valid ? reinterpret_cast<std::uint32_t*>(ptr) : nullptr;
}

CUresult enqueue_with_word(CUstream handle, Operation operation) {
  const auto lock = lock_work();
  const StreamRef stream = find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) return check_not_capturing(stream);
  return enqueue(stream, std::move(operation));
}

}  // namespace

void softcuda::see(Flag& flag) {
  if (flag.seen) return;
  flag.seen = true;
  const auto writer = writers().find(flag.word);
  if (writer != writers().end()) flag.writer = writer->second;
  judge_streams();
}

ENTRY(cuStreamWaitValue32_v2, 11070,
      (CUstream stream, CUdeviceptr ptr, std::uint32_t value, unsigned flags)) {
  SOFTCUDA_ENTER();
  constexpr unsigned kAtLeast = 0, kEqual = 1;
  RETURN_IF_FAILED(check_context());
  const std::uint32_t* word = word_at(ptr);
  if (!word) return CUDA_ERROR_INVALID_VALUE;
  if (flags != kAtLeast && flags != kEqual) return CUDA_ERROR_NOT_SUPPORTED;
  Operation operation;
  operation.flag = std::make_shared<Flag>(Flag{word, value, flags == kEqual, false, {}});
  operation.work = [flag = operation.flag] {
    while (!flag->satisfied()) std::this_thread::sleep_for(std::chrono::microseconds(20));
    return CUDA_SUCCESS;
  };
  operation.waits = true;
  return enqueue_with_word(stream, std::move(operation));
}
ENTRY(cuStreamWaitValue32, 8000,
      (CUstream stream, CUdeviceptr ptr, std::uint32_t value, unsigned flags)) {
  return cuStreamWaitValue32_v2(stream, ptr, value, flags);
}
ENTRY(cuStreamWriteValue32_v2, 11070,
      (CUstream stream, CUdeviceptr ptr, std::uint32_t value, unsigned flags)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_context());
  std::uint32_t* word = word_at(ptr);
  if (!word) return CUDA_ERROR_INVALID_VALUE;
  if (flags != 0) return CUDA_ERROR_NOT_SUPPORTED;
  Operation operation;
  operation.known = std::make_shared<Known>();
  operation.work = [word, value, known = operation.known] {
    writers()[word] = known->clock;
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
  };
  return enqueue_with_word(stream, std::move(operation));
}
ENTRY(cuStreamWriteValue32, 8000,
      (CUstream stream, CUdeviceptr ptr, std::uint32_t value, unsigned flags)) {
  return cuStreamWriteValue32_v2(stream, ptr, value, flags);
}
