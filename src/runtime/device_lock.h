// The lock that guards a device.
//
// A deleter may hold what the device's work needs to end (the interpreter's lock, for a callback of
// the program), and another thread may hold a device's lock while it waits for that work. So a
// deleter never waits for the lock: what it cannot free at once it leaves to the holder.
#pragma once
#include <array>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/deferred.h"
#include "runtime/state.h"

namespace umem::runtime {

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

// Calls `act` with the lock of the device that has the address, and the id of its piece. What that
// returned, or false where no range has the address.
template <class Act>
bool with_range(State& s, const void* ptr, Act act) {
  const managed::RangeId found = s.ranges.find(ptr);
  if (found == managed::kNoRange) return false;
  DeviceLock lock(s.slot_of(found));
  const managed::RangeId id = s.ranges.find(ptr);  // under the lock: it may have gone
  return id != managed::kNoRange && &s.slot_of(id) == &lock.slot() && act(lock, id);
}
// Calls `act` with the lock of every device that was opened, one after the other.
template <class Act>
void each_lock(State& s, Act act) {
  if (s.forked) return;
  each_ordinal(s.opened, [&](int ordinal) {
    DeviceLock lock(s.slot(ordinal));
    if (lock.device()) act(lock);
  });
}
// The same with every device.
template <class Act>
void each_device(State& s, Act act) {
  each_lock(s, [&](DeviceLock& lock) { act(*lock.device()); });
}

// The locks of several devices, taken in the order of ordinals, and none in a forked child that
// touches nothing.
class HeldDevices {
 public:
  HeldDevices(State& s, DeviceMask mask);
  // Of which the range is; null: none that is held.
  Device* of(managed::RangeId id) const { return by_ordinal_[index(state_.ranges.device_of(id))]; }
  template <class Act>
  void each(Act act) const {
    for (const DeviceLock& lock : locks_) act(*lock.device());
  }
  bool empty() const { return locks_.empty(); }
  // Blocks are alive, or in use on a stream or by an op: the devices have to stay.
  bool busy() const;

 private:
  static std::size_t index(int ordinal) { return static_cast<std::size_t>(ordinal); }
  State& state_;
  std::vector<DeviceLock> locks_;
  std::array<Device*, kMaxDevices> by_ordinal_{};
};

}  // namespace umem::runtime
