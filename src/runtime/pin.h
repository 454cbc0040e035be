// Spans of a program's bytes, and those that it pinned.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "managed/memory_ops.h"

namespace umem::runtime {

using MemSpans = std::vector<managed::MemSpan>;

enum class PinKind : unsigned char {
  kPin,     // stays on the device
  kExempt,  // policies leave it where it is
};

struct Pin {
  managed::MemSpan span;
  PinKind kind = PinKind::kPin;
  std::uint64_t number = 0;  // the pin call's number
  std::string label;
};
// Pins by their first byte. A span lies in one block and ends with it.
using Pins = std::multimap<std::uintptr_t, Pin>;

}  // namespace umem::runtime
