// A block from the arena and room for it by the engine.
#pragma once
#include <cstddef>

#include "base/status.h"
#include "driver/types.h"
#include "runtime/device_lock.h"
#include "runtime/op.h"

namespace umem::runtime {

// With the device's lock, which is given up where it waits for the device.
Result<void*> allocate_on(State& s, DeviceLock& lock, std::size_t bytes, cu::CUstream stream,
                          Op* op);

}  // namespace umem::runtime
