#include "torch_ext/cuda/pools.h"

#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <utility>

namespace umem::torch_ext {

void Pools::begin(c10::DeviceIndex device, c10::MempoolId_t id, Filter filter, bool capture) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
  std::lock_guard guard(mutex_);
  abandoned_.erase({device, id});
  active_.push_back(
      {device, id, std::move(filter), capture, capture, std::this_thread::get_id(), stream});
  count_.store(static_cast<int>(active_.size()), std::memory_order_relaxed);
}

bool Pools::end(c10::DeviceIndex device, c10::MempoolId_t id) {
  std::lock_guard guard(mutex_);
  const auto ended = std::find_if(active_.begin(), active_.end(),
                                  [&](const Active& pool) { return pool.is(device, id); });
  if (ended == active_.end()) return false;
  const bool counted = ended->counted;
  active_.erase(ended);
  count_.store(static_cast<int>(active_.size()), std::memory_order_relaxed);
  return counted;
}

// A graph is captured from its thread's current stream, and that thread allocates nothing between
// `begin` and the start of the capture.
Pools::Abandoned Pools::take_abandoned(bool of_any_thread) {
  std::lock_guard guard(mutex_);
  Abandoned found;
  std::erase_if(active_, [&](Active& pool) {
    if (!pool.capture) return false;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(pool.stream, &status) != cudaSuccess) {
      (void)cudaGetLastError();  // otherwise the program's next check reports it
      return false;
    }
    const bool over = status == cudaStreamCaptureStatusNone;
    pool.seen_capturing |= !over;
    const bool own = pool.thread == std::this_thread::get_id();
    if (!over || (!pool.seen_capturing && !own)) return false;
    found.over += std::exchange(pool.counted, false) ? 1 : 0;
    if (!own && !of_any_thread) return false;
    found.ended.emplace_back(pool.device, pool.id);
    abandoned_.emplace(pool.device, pool.id);
    return true;
  });
  count_.store(static_cast<int>(active_.size()), std::memory_order_relaxed);
  return found;
}

bool Pools::was_abandoned(c10::DeviceIndex device, c10::MempoolId_t id) {
  std::lock_guard guard(mutex_);
  return abandoned_.erase({device, id}) > 0;
}

bool Pools::claim(c10::DeviceIndex device, cudaStream_t stream) {
  std::lock_guard guard(mutex_);
  return std::any_of(active_.begin(), active_.end(), [&](const Active& pool) {
    // The graph of a capture that is over, which its filter names, may be gone.
    const bool over = pool.capture && !pool.counted;
    return pool.device == device && !over && pool.filter(stream);
  });
}

}  // namespace umem::torch_ext
