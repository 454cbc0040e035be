// Waits for a device, with its lock released meanwhile.
#pragma once
#include "base/status.h"
#include "runtime/device_lock.h"

namespace umem::runtime {

// Waits until all returned memory is freed; returns the driver's error if it refused some.
Status wait_until_freed(DeviceLock& lock);
// Returns all cached memory to the driver.
Status release_all_cached(DeviceLock& lock);
// Waits until the driver has completed all evictions, and all work on the device.
Status wait_for_moves(State& s, DeviceLock& lock);
// Waits for the device, so that no stream uses a block, and returns cached memory to the driver.
Status settle(State& s, DeviceLock& lock);

}  // namespace umem::runtime
