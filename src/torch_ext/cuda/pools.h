// The allocations that currently belong to a private pool: those inside torch.cuda.use_mem_pool and
// those of a graph being captured.
#pragma once
#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

namespace umem::torch_ext {

class Pools {
 public:
  using Filter = std::function<bool(cudaStream_t)>;

  void begin(c10::DeviceIndex device, c10::MempoolId_t id, Filter filter, bool capture);
  // The `capture` given to `begin`; false if it never began.
  bool end(c10::DeviceIndex device, c10::MempoolId_t id);

  // One load where no pool is active, which is nearly always.
  bool claim(c10::DeviceIndex device, cudaStream_t stream) {
    if (C10_LIKELY(count_.load(std::memory_order_relaxed) == 0)) return false;
    return any_claims(device, stream);
  }

 private:
  struct Active {
    c10::DeviceIndex device;
    c10::MempoolId_t id;
    Filter filter;
    bool capture;
  };
  bool any_claims(c10::DeviceIndex device, cudaStream_t stream);

  std::atomic<int> count_{0};
  std::mutex mutex_;
  std::vector<Active> active_;
};

}  // namespace umem::torch_ext
