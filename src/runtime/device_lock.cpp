#include "runtime/device_lock.h"

#include <algorithm>
#include <utility>

namespace umem::runtime {

HeldDevices::HeldDevices(State& s, DeviceMask mask) : state_(s) {
  if (s.forked) return;
  each_ordinal(mask, [&](int ordinal) {
    DeviceLock lock(s.slot(ordinal));
    if (!lock.device()) return;
    by_ordinal_[index(ordinal)] = lock.device();
    locks_.push_back(std::move(lock));
  });
}

bool HeldDevices::busy() const {
  if (state_.captures > 0) return true;
  return std::any_of(locks_.begin(), locks_.end(), [](const DeviceLock& lock) {
    Device& device = *lock.device();
    return lock.slot().waiting > 0 || device.arena.stats().active[arena::kAll].current > 0 ||
           device.engine.ledger().op_pinned_bytes() > 0;
  });
}

}  // namespace umem::runtime
