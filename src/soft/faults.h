// Page faults of the open device, and windows in which pages take none.
#pragma once
#include <cstddef>

#include "base/units.h"

namespace umem::soft {

// True if the address was a managed page, which is now accessible. Called on the faulting thread.
bool handle_fault(void* address, bool writes);

// The managed pages in [ptr, ptr + bytes) are accessible and do not move until the window is
// closed. `writes`: the call writes to them. kNone: there are none; kRefused: by the kernel, as
// mappings are limited. Only a kOpen window is closed.
enum class Window { kNone, kOpen, kRefused };
Window open_window(const void* ptr, std::size_t bytes, bool writes);
void close_window(const void* ptr, std::size_t bytes);
// With a disk, what a window holds may be in RAM beyond the frames, so a longer one is made in
// parts.
constexpr std::size_t kLongestWindow = 8 * MiB;
bool windows_are_limited();

}  // namespace umem::soft
