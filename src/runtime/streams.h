// Streams of libraries other than torch.
#pragma once
#include <cstdint>

#include "base/export.h"
#include "base/status.h"

namespace umem::runtime {

// Orders later work on `waiter` after all work that is on `on` now; both are streams of the device.
// The software device runs in program order anyway. kBadState while either stream captures a graph.
UMEM_API Status wait_stream(int device, std::uintptr_t waiter, std::uintptr_t on);
// True if the stream captures a CUDA graph; false if the driver refuses to answer.
UMEM_API bool stream_captures(int device, std::uintptr_t stream);

}  // namespace umem::runtime
