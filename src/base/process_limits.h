// The reason why the kernel refused this process memory or a mapping.
#pragma once
#include <cstddef>

namespace umem {

// Writes a sentence about the process limit that was reached into `text`, truncated to `size`, and
// returns `text`. Does not allocate: the page-fault handler calls it.
const char* describe_reached_limit(char* text, std::size_t size);

}  // namespace umem
