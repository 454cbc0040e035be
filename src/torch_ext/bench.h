// How long one allocation and its free take.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstddef>

namespace umem::torch_ext {

// Mean ns, from the allocator's cache: the first block fills it.
inline double mean_alloc_ns(c10::Allocator& allocator, std::size_t nbytes, std::size_t iterations) {
  TORCH_CHECK_VALUE(iterations > 0, "iterations must be at least 1");
  {
    const c10::DataPtr first = allocator.allocate(nbytes);
  }
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < iterations; ++i)
    const c10::DataPtr block = allocator.allocate(nbytes);
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
  return spent.count() / static_cast<double>(iterations);
}

}  // namespace umem::torch_ext
