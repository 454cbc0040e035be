#include "torch_ext/cuda/pools.h"

#include <algorithm>

namespace umem::torch_ext {

void Pools::begin(c10::DeviceIndex device, c10::MempoolId_t id, Filter filter, bool capture) {
  std::lock_guard guard(mutex_);
  active_.push_back({device, id, std::move(filter), capture});
  count_.store(static_cast<int>(active_.size()), std::memory_order_relaxed);
}

bool Pools::end(c10::DeviceIndex device, c10::MempoolId_t id) {
  std::lock_guard guard(mutex_);
  const auto ended = std::find_if(active_.begin(), active_.end(), [&](const Active& pool) {
    return pool.device == device && pool.id == id;
  });
  if (ended == active_.end()) return false;
  const bool capture = ended->capture;
  active_.erase(ended);
  count_.store(static_cast<int>(active_.size()), std::memory_order_relaxed);
  return capture;
}

bool Pools::any_claims(c10::DeviceIndex device, cudaStream_t stream) {
  std::lock_guard guard(mutex_);
  return std::any_of(active_.begin(), active_.end(), [&](const Active& pool) {
    return pool.device == device && pool.filter(stream);
  });
}

}  // namespace umem::torch_ext
