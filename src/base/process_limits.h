// The memory that the kernel has for this process, and the reason why it refused memory or a
// mapping.
#pragma once
#include <cstddef>

namespace umem {

// Bytes that the kernel can give without swapping, with what it can drop of its page cache; 0 if
// unknown. Control groups do not count: memory that the NVIDIA driver takes is not charged to them.
std::size_t available_memory();

// True if the process's private memory and so many bytes more exceed RLIMIT_DATA. Does not
// allocate.
bool exceeds_data_limit(std::size_t bytes);

// Writes a sentence about the process limit that was reached into `text`, truncated to `size`, and
// returns `text`. `wanted`: bytes that were refused; 0 if unknown. Does not allocate: the
// page-fault handler calls it.
const char* describe_reached_limit(char* text, std::size_t size, std::size_t wanted = 0);

}  // namespace umem
