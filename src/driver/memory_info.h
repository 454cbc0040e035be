// A device's total and free memory.
#pragma once
#include <cstddef>

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
  return found;
}

}  // namespace umem::driver
