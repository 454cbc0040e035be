// A failed allocation of the runtime as torch's exceptions.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <string>

#include "base/status.h"
#include "runtime/failure.h"

namespace umem::torch_ext {

inline bool is_out_of_memory(const runtime::Failure& failure) {
  return is_out_of_memory(static_cast<Code>(failure.code));
}

// umem's tensors can outlive `disable`, and call their allocator when they are resized.
inline bool is_turned_off(const runtime::Failure& failure) {
  return static_cast<Code>(failure.code) == Code::kOff;
}

// Throws torch.OutOfMemoryError, or RuntimeError if memory is not the cause. `torchs_words`:
// torch's own message, by which programs that search for a batch size recognise it.
[[noreturn]] inline void raise(std::size_t bytes, const runtime::Failure& failure,
                               c10::Device device, const std::string& torchs_words,
                               std::size_t allocated = 0, std::size_t reserved = 0) {
  if (is_out_of_memory(failure)) {
    c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(bytes), allocated, reserved, device);
    TORCH_CHECK_WITH(OutOfMemoryError, false, torchs_words, " ", failure.message);
  }
  TORCH_CHECK(false, "umem cannot allocate ", bytes, " bytes: ", failure.message);
}

}  // namespace umem::torch_ext
