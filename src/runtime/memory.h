// Allocates a block from the arena, with room for it from the engine.
#pragma once
#include <cstddef>

#include "base/status.h"
#include "driver/types.h"
#include "runtime/device_lock.h"
#include "runtime/op.h"

namespace umem::runtime {

// Requires the device's lock, and releases it while it waits for the device.
Result<void*> allocate_on(State& s, DeviceLock& lock, std::size_t bytes, cu::CUstream stream,
                          Op* op);

}  // namespace umem::runtime
