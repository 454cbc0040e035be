#include "runtime/unmanaged.h"

#include <algorithm>
#include <new>

#include "base/units.h"

namespace umem::runtime {
namespace {

constexpr std::size_t kMost = 1 << 16;  // storages of a step that are told apart

}  // namespace

void Unmanaged::use(const void* storage, std::size_t bytes) noexcept {
  if (!counts_ || bytes < kPageBytes || busy_.test_and_set(std::memory_order_acquire)) return;
  if (ended_.exchange(false)) {
    step_.clear();
    step_bytes_ = 0;
  }
  try {
    if (step_.size() < kMost) {
      std::size_t& used = step_[storage];
      step_bytes_ += std::max(used, bytes) - used;
      used = std::max(used, bytes);
      most_ = std::max(most_.load(), step_bytes_);
    }
  } catch (const std::bad_alloc&) {  // the figure is too small then
  }
  busy_.clear(std::memory_order_release);
}

}  // namespace umem::runtime
