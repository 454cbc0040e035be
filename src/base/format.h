// Numbers formatted for messages.
#pragma once
#include <cstddef>
#include <cstdio>
#include <string>

#include "base/units.h"

namespace umem {

inline std::string format_bytes(std::size_t bytes) {
  char text[32];
  const auto value = static_cast<double>(bytes);
  if (bytes >= GiB) {
    std::snprintf(text, sizeof text, "%.2f GiB", value / static_cast<double>(GiB));
  } else if (bytes >= MiB) {
    std::snprintf(text, sizeof text, "%.1f MiB", value / static_cast<double>(MiB));
  } else {
    std::snprintf(text, sizeof text, "%zu bytes", bytes);
  }
  return text;
}

}  // namespace umem
