// Page faults of the open device, and windows in which pages take none.
#pragma once
#include <cstddef>

namespace umem::soft {

// True if the address was a managed page, which is now accessible. Called on the faulting thread.
bool handle_fault(void* address, bool writes);

// The managed pages in [ptr, ptr + bytes) are accessible and do not move until the window is
// closed. `writes`: the call writes to them. kNone: there are none; kRefused: by the kernel, as
// mappings are limited. Only a kOpen window is closed.
enum class Window { kNone, kOpen, kRefused };
Window open_window(const void* ptr, std::size_t bytes, bool writes);
void close_window(const void* ptr, std::size_t bytes);

}  // namespace umem::soft
