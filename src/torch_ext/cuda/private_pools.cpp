// Private pools: torch's own allocator keeps them; umem notes which are active and what they hold.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include "runtime/accounts.h"
#include "torch_ext/cuda/cuda_allocator.h"
#include "torch_ext/unlocked.h"

namespace umem::torch_ext {
namespace {

// A graph's filter matches streams that capture, which none does yet; that of
// torch.cuda.use_mem_pool matches immediately.
bool is_of_graph(c10::DeviceIndex device, const Pools::Filter& filter) {
  return !filter(c10::cuda::getCurrentCUDAStream(device).stream());
}

// torch 2.13 and later report the start of a capture.
bool announces_capture([[maybe_unused]] c10::DeviceIndex device,
                       [[maybe_unused]] const Pools::Filter& filter) {
#if UMEM_TORCH_AT_LEAST(2, 13)
  return false;
#else
  return is_of_graph(device, filter);
#endif
}

// A replay uses its inputs at times that umem does not see.
void check_graphs(c10::DeviceIndex device, const Pools::Filter& filter) {
  const Unlocked without_gil;
  TORCH_CHECK(
      runtime::serves_graphs() || !is_of_graph(device, filter),
      "umem: with backing=mapped no CUDA graph can be captured, because its replays would use "
      "memory that umem may be moving; use backing=managed (UMEM_BACKING=managed)");
}

}  // namespace

void CudaAllocator::beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id,
                                        Pools::Filter filter) {
  check_graphs(device, filter);  // before the capture begins
  const bool capture = announces_capture(device, filter);
  end_abandoned(true);
  native_->beginAllocateToPool(device, id, filter);
  if (capture) runtime::capture_begin();
  pools_.begin(device, id, std::move(filter), capture);
}

// torch before 2.13 ends nothing if a capture fails, but the graph whose filter it passed may be
// destroyed.
void CudaAllocator::end_abandoned([[maybe_unused]] bool of_any_thread) noexcept {
#if !UMEM_TORCH_AT_LEAST(2, 13)
  const Pools::Abandoned abandoned = pools_.take_abandoned(of_any_thread);
  for (int i = 0; i < abandoned.over; ++i) runtime::capture_end();
  for (const auto& [device, id] : abandoned.ended) {
    try {
      native_->endAllocateToPool(device, id);
      at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(id);
    } catch (const std::exception&) {
      // Torch ended it meanwhile.
    }
  }
#endif
}

void CudaAllocator::endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id) {
  if (pools_.was_abandoned(device, id)) return;
  if (pools_.end(device, id)) runtime::capture_end();
  native_->endAllocateToPool(device, id);
  tell_outside_bytes(device);
}

#if UMEM_TORCH_AT_LEAST(2, 13)
void CudaAllocator::markCaptureBegin(c10::DeviceIndex device) {
  runtime::capture_begin();
  ++marked_captures_;
  native_->markCaptureBegin(device);
}

void CudaAllocator::markCaptureEnd(c10::DeviceIndex device) {
  native_->markCaptureEnd(device);
  // Otherwise it began before umem was enabled.
  for (int marked = marked_captures_; marked > 0;)
    if (marked_captures_.compare_exchange_weak(marked, marked - 1)) return runtime::capture_end();
}
#endif

void CudaAllocator::releasePool(c10::DeviceIndex device, c10::MempoolId_t id) {
  end_abandoned(true);
  native_->releasePool(device, id);
  tell_outside_bytes(device);
}

int CudaAllocator::getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t id) {
  return native_->getPoolUseCount(device, id);
}

void CudaAllocator::createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t id,
                                       std::shared_ptr<caching::CUDAAllocator> allocator) {
  native_->createOrIncrefPool(device, id, std::move(allocator));
}

void CudaAllocator::setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t id, bool use_on_oom) {
  native_->setUseOnOOM(device, id, use_on_oom);
}

void CudaAllocator::setNoSplit(c10::DeviceIndex device, c10::MempoolId_t id) {
  native_->setNoSplit(device, id);
}

bool CudaAllocator::checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t id,
                                             const std::unordered_set<void*>& expected) {
  return native_->checkPoolLiveAllocations(device, id, expected);
}

std::shared_ptr<caching::AllocatorState> CudaAllocator::getCheckpointState(c10::DeviceIndex device,
                                                                           c10::MempoolId_t id) {
  return native_->getCheckpointState(device, id);
}

caching::CheckpointDelta CudaAllocator::setCheckpointPoolState(
    c10::DeviceIndex device, std::shared_ptr<caching::AllocatorState> state) {
  caching::CheckpointDelta delta = native_->setCheckpointPoolState(device, std::move(state));
  for (c10::DataPtr& block : delta.dataptrs_allocd) adopt(block);
  tell_outside_bytes(device);
  return delta;
}

}  // namespace umem::torch_ext
