// A device's cached memory, with its lock and without waiting.
#pragma once
#include <cstddef>

#include "base/status.h"

namespace umem::runtime {

struct Device;

// The ranges of blocks whose uses on other streams have completed are dead from here on.
void retire_reclaimed(Device& device);
// Gives cached memory back to the driver. On a GPU it is freed later: see `wait_until_freed`.
Status trim_cache(Device& device, std::size_t keep_bytes);
// Removes the layout if no block of it is alive.
Status drop_idle_layout(Device& device);

}  // namespace umem::runtime
