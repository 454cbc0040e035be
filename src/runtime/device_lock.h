// One device's place in the runtime, and the lock that guards it.
//
// A deleter may hold what the device's work needs to end (the interpreter's lock, for a callback of
// the program), and another thread may hold a device's lock while it waits for that work. So a
// deleter never waits for the lock: what it cannot free at once it leaves to the holder.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

namespace umem::runtime {

struct Device;

inline constexpr int kMaxDevices = 32;

// A block that was released while another thread had the lock.
struct Released {
  void* block;
  Released* before;
};

// Never destroyed. Order of locks: the registry's, those of devices by ordinal, then those that are
// taken for a moment (the range table's, the recorder's, that of scopes, that of torch's history).
struct Slot {
  std::mutex mutex;
  std::unique_ptr<Device> device;  // null where nothing was allocated yet
  std::uint64_t allocs = 0, frees = 0, ooms = 0;
  unsigned waiting = 0;  // threads that wait for the device without the lock: it has to stay

  // Left to the next who takes the lock: released blocks, the newest first, and ends of steps.
  std::atomic<Released*> released{nullptr};
  std::atomic<unsigned> steps{0};
};

// The lock of a device. Whoever takes it does what was left meanwhile.
class DeviceLock {
 public:
  explicit DeviceLock(Slot& slot) : slot_(&slot) { lock(); }
  // Without waiting, and so perhaps without the lock; what may wait for the device stays left.
  DeviceLock(Slot& slot, std::try_to_lock_t);
  ~DeviceLock() {
    if (held_) unlock();
  }
  DeviceLock(DeviceLock&& other) noexcept
      : slot_(other.slot_), held_(std::exchange(other.held_, false)) {}
  DeviceLock& operator=(DeviceLock&&) = delete;

  void lock();
  void unlock();
  bool held() const { return held_; }
  Slot& slot() const { return *slot_; }
  Device* device() const { return slot_->device.get(); }

  // Calls `wait` without the lock. The device stays; all else may have changed.
  template <class Wait>
  void without(Wait wait) {
    ++slot_->waiting;
    unlock();
    wait();
    lock();
    --slot_->waiting;
  }

 private:
  Slot* slot_;
  bool held_ = false;
};

// alloc.cpp: without waiting for anything.
void free_released(Slot& slot);
// runtime.cpp: ends the steps that ended while the lock was taken.
void end_steps(Slot& slot);

inline DeviceLock::DeviceLock(Slot& slot, std::try_to_lock_t)
    : slot_(&slot), held_(slot.mutex.try_lock()) {
  if (held_ && slot_->released.load(std::memory_order_relaxed)) free_released(*slot_);
}

inline void DeviceLock::lock() {
  slot_->mutex.lock();
  held_ = true;
  if (slot_->released.load(std::memory_order_relaxed)) free_released(*slot_);
  if (slot_->steps.load(std::memory_order_relaxed) > 0) end_steps(*slot_);
}

inline void DeviceLock::unlock() {
  held_ = false;
  slot_->mutex.unlock();
  // What was released since is done here, as nobody else may come for long.
  while (slot_->released.load() && slot_->mutex.try_lock()) {
    free_released(*slot_);
    slot_->mutex.unlock();
  }
}

}  // namespace umem::runtime
