// Managed ranges: whole 2 MiB pages of address space from cuMemAllocManaged, each with a small id,
// and the map from any address to its range. Where managed memory cannot be used, plain device
// memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backing/page_map.h"
#include "base/status.h"
#include "base/units.h"
#include "driver/place.h"
#include "driver/table.h"

namespace umem::backing {

using RangeId = std::uint32_t;
inline constexpr RangeId kNoRange = 0;  // ids start at 1

struct Range {
  std::uintptr_t base = 0;  // 2 MiB-aligned
  std::size_t bytes = 0;    // a multiple of 2 MiB
  std::uintptr_t raw = 0;   // what the driver returned (differs when it was not aligned)
  int device = 0;
};

// Not thread-safe but for `find`, which may race with creation of other ranges.
class RangeTable {
 public:
  explicit RangeTable(const driver::Table& table) : table_(table) {}
  RangeTable(const RangeTable&) = delete;
  RangeTable& operator=(const RangeTable&) = delete;

  // Most bytes of all ranges together; 0 is unbounded.
  void set_limit(std::size_t bytes) { limit_ = bytes; }
  void set_managed(bool managed) { managed_ = managed; }
  // `bytes` is rounded up to 2 MiB. kOutOfDeviceMemory beyond the limit; else the driver's reason.
  Result<RangeId> create(std::size_t bytes, const driver::Place& place);
  Status destroy(RangeId id, const driver::Place& place);

  RangeId find(const void* ptr) const { return map_.find(reinterpret_cast<std::uintptr_t>(ptr)); }
  const Range& operator[](RangeId id) const { return ranges_[id]; }
  std::size_t total_bytes() const { return total_bytes_; }

 private:
  Status reserve(std::size_t bytes, cu::CUdeviceptr& ptr);

  const driver::Table& table_;
  PageMap map_;
  std::vector<Range> ranges_{1};
  std::vector<RangeId> free_ids_;
  std::size_t total_bytes_ = 0, limit_ = 0;
  bool managed_ = true;
};

}  // namespace umem::backing
