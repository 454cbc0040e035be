// The allocator object that torch calls. It serves umem's memory itself; private pools, and calls
// that allocate nothing, go to the previous allocator.
//
// Memory of private pools (torch.cuda.MemPool, CUDA graphs) is never managed: it is plain device
// memory of torch's own allocator, so that graphs replay without page faults and CUDA IPC works.
#pragma once
#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "runtime/failure.h"
#include "torch_ext/cuda/history.h"
#include "torch_ext/cuda/pools.h"
#include "torch_ext/cuda/torch_version.h"

namespace umem::torch_ext {

namespace caching = c10::cuda::CUDACachingAllocator;

class CudaAllocator final : public caching::CUDAAllocator {
 public:
  // Never destroyed: storages remember their allocator.
  static CudaAllocator& instance();
  // Before it is handed to torch.
  void set_native(caching::CUDAAllocator* native) { native_ = native; }
  caching::CUDAAllocator* native() const { return native_; }
  // Reports the bytes of torch's own allocator on every device: they may have changed while it was
  // active.
  void tell_outside_bytes();

  // allocator.cpp
  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;
  void* raw_alloc(std::size_t bytes) override;
  void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override;
  void raw_delete(void* ptr) override;
  using c10::DeviceAllocator::recordStream;
  void recordStream(const c10::DataPtr& ptr, c10::cuda::CUDAStream stream) override;
  void* getBaseAllocation(void* ptr, std::size_t* bytes) override;
  void cacheInfo(c10::DeviceIndex device, std::size_t* largest) override;
  void emptyCache(c10::MempoolId_t id = {0, 0}) override;
  caching::ShareableHandle shareIpcHandle(void* ptr) override;
#if UMEM_TORCH_AT_LEAST(2, 13)
  c10::DataPtr allocateWithAddress(std::size_t bytes, void* address) override;
#endif

  // forwards.cpp: calls other than allocations
  void init(int device_count) override;
  bool initialized() override;
  void enable(bool value) override;
  bool isEnabled() const override;
  std::string name() override { return "umem"; }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override;
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) override;
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device,
                          std::size_t bytes, cudaStream_t stream, bool p2p_enabled) override;
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(
      c10::DeviceIndex device) override;
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override;
#if UMEM_TORCH_AT_LEAST(2, 12)
  void attachOomRejectionObserver(caching::OomRejectionObserver observer) override;
#endif

  // statistics.cpp
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  double getMemoryFraction(c10::DeviceIndex device) override;
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override;

  // recording.cpp
  caching::SnapshotInfo snapshot(c10::MempoolId_t id = {0, 0}, bool include_traces = true) override;
  bool isHistoryEnabled() override;
  void recordHistory(bool enabled, caching::CreateContextFn recorder, std::size_t max_entries,
                     caching::RecordContext when, bool clear,
                     const std::vector<std::string>& skip_actions) override;
  void recordAnnotation(
      const std::vector<std::pair<std::string, std::string>>& annotation) override;
  void pushCompileContext(std::string& context) override;
  void popCompileContext() override;
  void setUserMetadata(const std::string& metadata) override;
  std::string getUserMetadata() override;
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override;
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override;
#if UMEM_TORCH_AT_LEAST(2, 12)
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* ptr) override;
#endif
#if UMEM_TORCH_AT_LEAST(2, 14)
  bool supportsUserMetadata() override;
  void annotateMemory(const void* ptr, const std::string& metadata) override;
#endif

  // private_pools.cpp
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id,
                           Pools::Filter filter) override;
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id) override;
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t id) override;
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t id) override;
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t id,
                          std::shared_ptr<caching::CUDAAllocator> allocator) override;
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t id, bool use_on_oom) override;
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t id) override;
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t id,
                                const std::unordered_set<void*>& expected) override;
  std::shared_ptr<caching::AllocatorState> getCheckpointState(c10::DeviceIndex device,
                                                              c10::MempoolId_t id) override;
  caching::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex device, std::shared_ptr<caching::AllocatorState> state) override;
#if UMEM_TORCH_AT_LEAST(2, 13)
  void markCaptureBegin(c10::DeviceIndex device) override;
  void markCaptureEnd(c10::DeviceIndex device) override;
#endif

 private:
  static void free_any(void* ptr) noexcept;
  bool release(void* ptr);
  void adopt(c10::DataPtr& block);

  bool serves(c10::DeviceIndex device, cudaStream_t stream);
  // umem's memory; null if umem is off and torch's own allocator serves.
  void* take(std::size_t bytes, c10::DeviceIndex device, cudaStream_t stream);
  void* take_after_callbacks(std::size_t bytes, c10::DeviceIndex device, cudaStream_t stream,
                             runtime::Failure& failure);
  [[noreturn]] void fail(std::size_t bytes, c10::DeviceIndex device, cudaStream_t stream,
                         const runtime::Failure& failure);
  // The number of devices that torch's allocators know; 0 before CUDA is initialised.
  int device_count();
  std::size_t outside_bytes(c10::DeviceIndex device);
  std::size_t usable_bytes(c10::DeviceIndex device);
  void tell_outside_bytes(c10::DeviceIndex device);
  // Gives memory back until torch's own allocator can take `wanted` bytes within the budget. False:
  // not now.
  bool make_way(c10::DeviceIndex device, std::size_t wanted);
  template <class Make>
  auto beside(c10::DeviceIndex device, std::size_t bytes, Make make) -> decltype(make());
  void end_abandoned(bool of_any_thread) noexcept;

  caching::CUDAAllocator* native_ = nullptr;
  History history_;
  Pools pools_;
  std::atomic<int> marked_captures_{0};  // that torch 2.13 and later announced, and did not end
  std::mutex outside_mutex_;             // so that the last report is the latest figure
  std::mutex mutex_;                     // guards the following
  std::vector<caching::OutOfMemoryObserver> oom_observers_;
  struct {
    double set = 0;
    std::size_t budget = 0;  // the resulting budget
  } fraction_;               // the last setting
};

}  // namespace umem::torch_ext
