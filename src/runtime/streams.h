// Streams of others than torch.
#pragma once
#include <cstdint>

#include "base/export.h"
#include "base/status.h"

namespace umem::runtime {

// Work that `waiter` gets from now on comes after all that `on` holds, both streams of the device;
// on the software device everything is in program order already. kBadState while either captures.
UMEM_API Status wait_stream(int device, std::uintptr_t waiter, std::uintptr_t on);
// Whether a CUDA graph is captured on the stream; what the driver refuses to tell is no capture.
UMEM_API bool stream_captures(int device, std::uintptr_t stream);

}  // namespace umem::runtime
