// The lock that guards a device.
//
// A deleter may hold a resource that the device's work needs to finish (the interpreter's lock, for
// a callback of the program), while another thread holds the device's lock and waits for that work.
// So a deleter never waits for the lock: a block that it cannot free at once is left to the lock's
// holder.
#pragma once
#include <array>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/deferred.h"
#include "runtime/state.h"

namespace umem::runtime {

// The lock of a device. The thread that takes it does the work that was left meanwhile.
class DeviceLock {
 public:
  explicit DeviceLock(Slot& slot) : slot_(&slot) { lock(); }
  // Does not wait, so the lock may not be held afterwards; work that may wait for the device is
  // left.
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

  // Calls `wait` without the lock. The device stays open; everything else may have changed.
  template <class Wait>
  void without(Wait wait) {
    ++slot_->waiting;
    unlock();
    wait();
    lock();
    if (slot_->waiting > 0) --slot_->waiting;  // 0 in a child that was forked meanwhile
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
  // Frees blocks that were released meanwhile: the next thread may come much later.
  while (slot_->released.load() && slot_->mutex.try_lock()) {
    free_released(*slot_);
    slot_->mutex.unlock();
  }
}

// Calls `act` with the lock of the device that owns the address, and the id of the piece there.
// Returns the result, or false if no range contains the address.
template <class Act>
bool with_range(State& s, const void* ptr, Act act) {
  const managed::RangeId found = s.ranges.find(ptr);
  if (found == managed::kNoRange) return false;
  DeviceLock lock(s.slot_of(found));
  const managed::RangeId id = s.ranges.find(ptr);  // again, under the lock
  return id != managed::kNoRange && &s.slot_of(id) == &lock.slot() && act(lock, id);
}
// Calls `act` with the lock of each open device in turn.
template <class Act>
void each_lock(State& s, Act act) {
  if (s.forked) return;
  each_ordinal(s.opened, [&](int ordinal) {
    DeviceLock lock(s.slot(ordinal));
    if (lock.device()) act(lock);
  });
}
// Calls `act` with each open device in turn, under its lock.
template <class Act>
void each_device(State& s, Act act) {
  each_lock(s, [&](DeviceLock& lock) { act(*lock.device()); });
}

// The locks of several devices, taken in ascending order. None in a forked child that must not
// touch devices.
class HeldDevices {
 public:
  HeldDevices(State& s, DeviceMask mask);
  // The range's device; null if its lock is not held.
  Device* of(managed::RangeId id) const { return by_ordinal_[index(state_.ranges.device_of(id))]; }
  template <class Act>
  void each(Act act) const {
    for (const DeviceLock& lock : locks_) act(*lock.device());
  }
  bool empty() const { return locks_.empty(); }
  // True if blocks are live, or in use on a stream or by an op, or while a graph is captured: the
  // devices must stay open.
  bool busy() const;

 private:
  static std::size_t index(int ordinal) { return static_cast<std::size_t>(ordinal); }
  State& state_;
  std::vector<DeviceLock> locks_;
  std::array<Device*, kMaxDevices> by_ordinal_{};
};

}  // namespace umem::runtime
