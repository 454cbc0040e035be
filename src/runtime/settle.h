// Waits for a device. The lock is given up meanwhile.
#pragma once
#include "base/status.h"
#include "runtime/device_lock.h"

namespace umem::runtime {

// The driver has all memory that was given back; its reason where it refused some.
Status wait_until_freed(DeviceLock& lock);
// Gives all cached memory back.
Status release_all_cached(DeviceLock& lock);
// Waits for the device, after which no stream uses a block, and gives back what is cached.
Status settle(State& s, DeviceLock& lock);

}  // namespace umem::runtime
