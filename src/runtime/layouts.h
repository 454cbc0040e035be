// Static layouts of each device's large blocks (arena/layout.h).
#pragma once
#include <cstddef>
#include <vector>

#include "arena/layout.h"
#include "base/export.h"
#include "base/status.h"

namespace umem::runtime {

// Call it where a step begins. Returns cached memory to the driver first. kBadState if the device
// is not open, a graph is being captured, or blocks of an earlier layout are live (that layout
// serves no more blocks, so a later call succeeds); kNotSupported if memory is not managed, or
// mapped memory has no room beside what lives; kInvalidArgument for entries that do not lie within
// `bytes`; otherwise the driver's error. `stays`, for mapped memory: others leave for the layout,
// and it leaves only if nothing else can.
UMEM_API Status install_layout(const std::vector<arena::LayoutEntry>& entries, std::size_t bytes,
                               int ordinal = 0, bool stays = false);
// The layout serves no more blocks, and is removed once none of its blocks is live.
UMEM_API void clear_layout(int ordinal = 0);
// All zero if there is no layout.
UMEM_API arena::LayoutStatus layout_status(int ordinal = 0);

}  // namespace umem::runtime
