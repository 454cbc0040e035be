// Opening and closing: the driver, and each device at its first use.
#pragma once
#include "base/options.h"
#include "base/status.h"
#include "runtime/device_lock.h"

namespace umem::runtime {

// Require the registry's lock. `open_driver` opens the driver for the options, `open_device` a
// device at its first use; `close_devices` closes all, and needs all devices' locks.
Status open_driver(State& s, const Options& options);
Status open_device(State& s, DeviceLock& lock, int ordinal);
Status close_devices(State& s);
// Requires the device's lock, not the registry's. Releases the lock meanwhile if the device is not
// open.
Status ensure_open(State& s, DeviceLock& lock, int ordinal);
// kInvalidArgument if the budget is below the floor.
Status check_limits(const Options& options);
// Requires the registry's lock, and the device's lock if the device is open.
engine::Limits limits_of(State& s, const Options& options, int ordinal);
// Sets the budget that the options leave to the device to find. `held_bytes`: of the device's
// memory, what counts towards the budget already.
Status resolve_budget(const State& s, const driver::Place& place, std::size_t held_bytes,
                      Options& options);

}  // namespace umem::runtime
