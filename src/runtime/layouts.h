// Static layouts of each device's large blocks (arena/layout.h).
#pragma once
#include <cstddef>
#include <vector>

#include "arena/layout.h"
#include "base/export.h"
#include "base/status.h"

namespace umem::runtime {

// A step begins here. Cached memory goes back to the driver first. kBadState when the device is not
// open, while a graph is captured, or while blocks of an earlier layout are alive: it serves no
// more, and a later try succeeds; kNotSupported where memory is not managed; kInvalidArgument for
// entries that do not lie within `bytes`; else the driver's reason.
UMEM_API Status install_layout(const std::vector<arena::LayoutEntry>& entries, std::size_t bytes,
                               int ordinal = 0);
// No further block is served from it, and it goes as soon as none is alive.
UMEM_API void clear_layout(int ordinal = 0);
// All zero where there is none.
UMEM_API arena::LayoutStatus layout_status(int ordinal = 0);

}  // namespace umem::runtime
