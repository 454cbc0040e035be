// A device's total and free memory.
#pragma once
#include <algorithm>
#include <cstddef>

#include "base/process_limits.h"
#include "base/status.h"
#include "driver/place.h"
#include "driver/table.h"

namespace umem::driver {

struct MemoryInfo {
  std::size_t free_bytes = 0, total_bytes = 0;
};

inline Result<MemoryInfo> memory_info(const Table& table, const Place& place) {
  const CallScope scope(table, place);
  MemoryInfo found;
  UMEM_RETURN_IF_ERROR(
      check(table.cuMemGetInfo(&found.free_bytes, &found.total_bytes), Entry::cuMemGetInfo));
  // If device and host share one memory, the driver counts the host's page cache as used.
  if (place.integrated)
    found.free_bytes = std::max(found.free_bytes, std::min(available_memory(), found.total_bytes));
  return found;
}

}  // namespace umem::driver
