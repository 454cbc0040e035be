// The device's lock. Asynchronous signals are blocked while it is held: a handler that touched
// managed memory would fault and wait for the lock of its own thread.
#pragma once
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cstdint>
#include <mutex>

namespace umem::soft {

std::mutex& device_mutex();

// The managed addresses, readable without the lock; empty while no device is open.
struct Bounds {
  std::atomic<std::uintptr_t> begin{0}, end{0};
  bool contain(const void* ptr) const {
    const auto at = reinterpret_cast<std::uintptr_t>(ptr);
    return at >= begin.load(std::memory_order_acquire) && at < end.load(std::memory_order_acquire);
  }
};
extern Bounds g_bounds;
// The open device's managed addresses have no memory, so no signal handler can fault.
extern std::atomic<bool> g_unbacked;
// The thread inside the device (pthread_self), 0 for none.
extern std::atomic<std::uintptr_t> g_owner;
inline std::uintptr_t this_thread() {
  return static_cast<std::uintptr_t>(pthread_self());
}

// Blocks signals on this thread but for those of faults; returns the previous mask.
sigset_t block_signals();

class DeviceLock {
 public:
  DeviceLock() : masked_(!g_unbacked.load(std::memory_order_relaxed)) {
    if (masked_) previous_ = block_signals();
    device_mutex().lock();
    g_owner.store(this_thread(), std::memory_order_relaxed);
  }
  ~DeviceLock() {
    g_owner.store(0, std::memory_order_relaxed);
    device_mutex().unlock();
    if (masked_) pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
  }
  DeviceLock(const DeviceLock&) = delete;
  DeviceLock& operator=(const DeviceLock&) = delete;

 private:
  const bool masked_;
  sigset_t previous_;
};

}  // namespace umem::soft
