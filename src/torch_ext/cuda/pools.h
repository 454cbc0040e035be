// The allocations that currently belong to a private pool: those inside torch.cuda.use_mem_pool and
// those of a graph being captured.
#pragma once
#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace umem::torch_ext {

class Pools {
 public:
  using Filter = std::function<bool(cudaStream_t)>;
  using Id = std::pair<c10::DeviceIndex, c10::MempoolId_t>;

  void begin(c10::DeviceIndex device, c10::MempoolId_t id, Filter filter, bool capture);
  // True if a capture ended that was not reported as over before.
  bool end(c10::DeviceIndex device, c10::MempoolId_t id);
  struct Abandoned {
    int over = 0;           // captures that are found to be over although `end` was not called
    std::vector<Id> ended;  // their pools, if the caller has to end them
  };
  // The pool of another thread's capture is ended only on request: that thread may be about to.
  Abandoned take_abandoned(bool of_any_thread);
  // True, once, for such a pool whose end comes after all.
  bool was_abandoned(c10::DeviceIndex device, c10::MempoolId_t id);

  // One load; no pool is active nearly always.
  bool any() const { return count_.load(std::memory_order_relaxed) != 0; }
  bool claim(c10::DeviceIndex device, cudaStream_t stream);

 private:
  struct Active {
    c10::DeviceIndex device;
    c10::MempoolId_t id;
    Filter filter;
    bool capture;
    bool counted;  // the capture is under way, for all that is known
    std::thread::id thread;
    cudaStream_t stream;          // that is captured
    bool seen_capturing = false;  // before that, only its thread knows that the capture failed
    bool is(c10::DeviceIndex at, const c10::MempoolId_t& pool) const {
      return device == at && id == pool;
    }
  };

  std::atomic<int> count_{0};
  std::mutex mutex_;
  std::vector<Active> active_;
  std::set<Id> abandoned_;
};

}  // namespace umem::torch_ext
