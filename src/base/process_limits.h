// Why the kernel refused this process memory or a mapping.
#pragma once
#include <cstddef>

namespace umem {

// Writes a sentence about the limit of the process that is reached into `text`, cut off at `size`,
// and returns `text`. Allocates nothing: the page-fault handler calls it.
const char* describe_reached_limit(char* text, std::size_t size);

}  // namespace umem
