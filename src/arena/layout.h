// A static layout of one step: the place of each of its large allocations, in order, in one range,
// so that blocks with disjoint lifetimes use the same pages in turn. Each place is a subrange: ids
// of the range table for some pages of the range, which map to it while a block is in it.
//
// The layout is a guess that costs nothing if it is wrong: a place is handed out only when its
// pages are free, and after the first allocation that differs the rest of the step is served
// normally.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/status.h"
#include "driver/place.h"
#include "managed/range_table.h"

namespace umem::arena {

using managed::RangeId;

// One allocation of the step, in whole pages. An offset of kNoPlace: it has no place and is served
// normally (it outlives the step).
struct LayoutEntry {
  std::size_t bytes = 0, offset = 0;
};
inline constexpr std::size_t kNoPlace = static_cast<std::size_t>(-1);

struct LayoutStatus {
  std::size_t entries = 0, bytes = 0;  // allocations of a step, 0 if retired; bytes of the range
  std::uint64_t hits = 0, misses = 0;  // allocations served as planned; steps that differed
  bool followed = false;               // the last complete step went as planned
  std::uintptr_t base = 0;
  cu::CUstream stream = nullptr;  // the only stream served: the first block's
};

class Layout {
 public:
  // kInvalidArgument for entries that are not whole pages or lie beyond `bytes`; otherwise the
  // driver's error.
  static Result<std::unique_ptr<Layout>> make(managed::RangeTable& ranges,
                                              const driver::Place& place,
                                              const std::vector<LayoutEntry>& entries,
                                              std::size_t bytes);
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;

  // The subrange for the next large allocation of `bytes`, in whole pages; its pages map to it now.
  // kNoRange: it is served normally.
  RangeId take(std::size_t bytes, cu::CUstream stream);
  // The subrange's block was freed, and no stream uses it.
  void give_back(RangeId subrange);
  void step_ended();
  // Serves no more blocks; blocks in it stay until they are freed.
  void retire() { retired_ = true; }
  bool idle() const { return taken_ == 0; }
  // Returns the range to the driver. Requires that no subrange is in use.
  Status destroy(const driver::Place& place, managed::Freer* freer);

  RangeId range() const { return range_; }
  const std::vector<RangeId>& subranges() const { return subranges_; }  // each once
  LayoutStatus status() const;

 private:
  explicit Layout(managed::RangeTable& ranges) : ranges_(ranges) {}
  void add_subranges(const std::vector<LayoutEntry>& entries);
  struct Entry {
    std::size_t bytes;
    RangeId subrange;  // kNoRange: no place
  };

  managed::RangeTable& ranges_;
  RangeId range_ = managed::kNoRange;
  std::vector<Entry> entries_;
  std::vector<RangeId> subranges_;
  cu::CUstream stream_ = nullptr;
  std::size_t next_ = 0, taken_ = 0;
  std::uint64_t hits_ = 0, misses_ = 0;
  bool armed_ = true, bound_ = false, retired_ = false, followed_ = false;
};

}  // namespace umem::arena
