// Calls other than allocations, forwarded unchanged to torch's own allocator.
#include <c10/cuda/CUDAFunctions.h>

#include "torch_ext/cuda/cuda_allocator.h"
#include "torch_ext/cuda/workspace_sizes.h"

namespace umem::torch_ext {

// The native allocator too: this makes no device memory, and private pools and IPC need it.
void CudaAllocator::init(int device_count) {
  native_->init(device_count);
  tell_workspace_sizes();
}

int CudaAllocator::device_count() {
  return initialized() ? c10::cuda::device_count() : 0;
}

bool CudaAllocator::initialized() {
  return native_->initialized();
}

void CudaAllocator::enable(bool value) {
  native_->enable(value);
}

bool CudaAllocator::isEnabled() const {
  return native_->isEnabled();
}

std::shared_ptr<void> CudaAllocator::getIpcDevPtr(std::string handle) {
  return native_->getIpcDevPtr(std::move(handle));
}

void CudaAllocator::enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) {
  native_->enablePeerAccess(device, peer);
}

cudaError_t CudaAllocator::memcpyAsync(void* to, int to_device, const void* from, int from_device,
                                       std::size_t bytes, cudaStream_t stream, bool p2p_enabled) {
  return native_->memcpyAsync(to, to_device, from, from_device, bytes, stream, p2p_enabled);
}

std::vector<caching::StreamSegmentSize> CudaAllocator::getExpandableSegmentSizes(
    c10::DeviceIndex device) {
  return native_->getExpandableSegmentSizes(device);
}

std::pair<std::size_t, std::size_t> CudaAllocator::getMemoryInfo(c10::DeviceIndex device) {
  return native_->getMemoryInfo(device);
}

#if UMEM_TORCH_AT_LEAST(2, 12)
void CudaAllocator::attachOomRejectionObserver(caching::OomRejectionObserver observer) {
  native_->attachOomRejectionObserver(std::move(observer));
}
#endif

}  // namespace umem::torch_ext
