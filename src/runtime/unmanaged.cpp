#include "runtime/unmanaged.h"

#include <algorithm>
#include <new>

#include "base/units.h"

namespace umem::runtime {
namespace {

constexpr std::size_t kMost = 1 << 16;  // storages of a step that are told apart

}  // namespace

template <class Change>
void Unmanaged::change(Change change) noexcept {
  if (busy_.test_and_set(std::memory_order_acquire)) return;
  try {
    change();
  } catch (const std::bad_alloc&) {  // the figure is too small then
  }
  busy_.clear(std::memory_order_release);
}

void Unmanaged::use(const void* storage, std::size_t bytes) noexcept {
  if (bytes < kPageBytes) return;
  change([&] {
    if (step_.size() >= kMost || !step_.insert(storage).second) return;
    step_bytes_ += bytes;
    most_ = std::max(most_.load(), step_bytes_);
  });
}

void Unmanaged::step_ended() noexcept {
  change([&] {
    step_.clear();
    step_bytes_ = 0;
  });
}

void Unmanaged::reset() noexcept {
  step_ended();
  most_ = 0;
}

}  // namespace umem::runtime
