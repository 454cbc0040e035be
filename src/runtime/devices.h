// Opening and closing: the driver, and each device at its first use.
#pragma once
#include "base/options.h"
#include "base/status.h"
#include "runtime/device_lock.h"

namespace umem::runtime {

// With the registry's lock: opens the driver for the options; the device, at its first use; gives
// all back, with all devices' locks.
Status open_driver(State& s, const Options& options);
Status open_device(State& s, DeviceLock& lock, int ordinal);
Status close_devices(State& s);
// Without the registry's lock, and with the device's, which is given up meanwhile where it is not
// open.
Status ensure_open(State& s, DeviceLock& lock, int ordinal);
// What a device with these options may hold.
Status check_limits(const Options& options);
// With the registry's lock, and the device's where there is one.
engine::Limits limits_of(State& s, const Options& options, int ordinal);

}  // namespace umem::runtime
