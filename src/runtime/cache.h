// A device's cached memory, with its lock and without waiting.
#pragma once
#include <cstddef>

#include "base/status.h"

namespace umem::runtime {

struct Device;

// Marks the ranges as dead whose blocks' uses on other streams have completed.
void retire_reclaimed(Device& device);
// Returns cached memory to the driver. On a GPU the memory is freed later: see `wait_until_freed`.
Status trim_cache(Device& device, std::size_t keep_bytes, bool idle = false);
// Removes the layout if no block of it is alive.
Status drop_idle_layout(Device& device);
// A layout that was parted (engine/sharing.h) serves no more blocks, as each would cost calls.
void give_up_layout(Device& device);

}  // namespace umem::runtime
