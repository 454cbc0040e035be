#include "torch_ext/cpu_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>

#include "runtime/alloc.h"
#include "torch_ext/failure.h"

namespace umem::torch_ext {
namespace {

// torch's previous allocator, for blocks that are not umem's.
std::atomic<c10::Allocator*> g_previous{nullptr};

// This thread's tensors are host memory, not the device's.
constinit thread_local bool t_outside = false;

// One deleter for both kinds of memory: torch gets it once, and also uses it for another
// allocator's blocks.
void free_any(void* ptr) {
  if (!ptr) return;
  if (runtime::owns(ptr)) {
    c10::profiledCPUMemoryReporter().Delete(ptr);
    runtime::release(ptr);
    return;
  }
  c10::Allocator* previous = g_previous.load(std::memory_order_acquire);
  c10::DeleterFnPtr deleter = previous ? previous->raw_deleter() : nullptr;
  if (deleter) {
    deleter(ptr);
  } else {
    c10::GetDefaultCPUAllocator()->raw_deleter()(ptr);
  }
}

class CpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_any, c10::Device(c10::kCPU)};
    if (C10_UNLIKELY(t_outside)) return g_previous.load(std::memory_order_acquire)->allocate(bytes);
    runtime::Failure failure;
    void* ptr = runtime::allocate(bytes, 0, 0, &failure);
    if (C10_UNLIKELY(!ptr)) {
      if (is_turned_off(failure))
        return g_previous.load(std::memory_order_acquire)->allocate(bytes);
      raise(bytes, failure, c10::Device(c10::kCPU),
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate " +
                std::to_string(bytes) + " bytes.");
    }
    c10::profiledCPUMemoryReporter().New(ptr, bytes);
    return {ptr, ptr, &free_any, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

// Never destroyed: storages remember their allocator.
CpuAllocator& ours() {
  static auto* allocator = new CpuAllocator;
  return *allocator;
}

std::mutex g_allocator_mutex;

}  // namespace

bool allocator_installed() {
  return c10::GetCPUAllocator() == &ours();
}

void install_allocator() {
  std::lock_guard guard(g_allocator_mutex);
  if (allocator_installed()) return;
  g_previous.store(c10::GetCPUAllocator(), std::memory_order_release);
  c10::SetCPUAllocator(&ours());
  TORCH_CHECK(allocator_installed(),
              "torch kept another CPU allocator, which was set with a higher priority; umem must "
              "be enabled without it");
}

void remove_allocator() {
  std::lock_guard guard(g_allocator_mutex);
  if (allocator_installed()) c10::SetCPUAllocator(g_previous.load());
}

bool allocate_outside(bool outside) {
  return std::exchange(t_outside, outside);
}

double bench_cpu_alloc(std::size_t nbytes, std::size_t iterations) {
  TORCH_CHECK_VALUE(iterations > 0, "iterations must be at least 1");
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  {
    const c10::DataPtr first = allocator.allocate(nbytes);  // fills the cache
  }
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < iterations; ++i)
    const c10::DataPtr block = allocator.allocate(nbytes);
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
  return spent.count() / static_cast<double>(iterations);
}

}  // namespace umem::torch_ext
