// A static layout of one step: where each of its large allocations, in their order, lies in one
// range, so that blocks of disjoint lives take the same pages in turn. Each place is a subrange:
// ids of the range table's for some pages of the range, which lead there while a block is in it.
//
// The layout is a guess that costs nothing where it is wrong: a place is handed out only when its
// pages are free, and from the first allocation that differs on the step is served the ordinary
// way.
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

// Of one allocation of the step, both whole pages. An offset of kNoPlace: it has none, and is
// served the ordinary way (it lives longer than a step).
struct LayoutEntry {
  std::size_t bytes = 0, offset = 0;
};
inline constexpr std::size_t kNoPlace = static_cast<std::size_t>(-1);

struct LayoutStatus {
  std::size_t entries = 0, bytes = 0;  // allocations of a step; of the range
  std::uint64_t hits = 0, misses = 0;  // allocations served as planned; steps that differed
  bool followed = false;               // the last whole step went as planned, to its end
  std::uintptr_t base = 0;
  cu::CUstream stream = nullptr;  // the only one served: that of the first block
};

class Layout {
 public:
  // kInvalidArgument for entries that are no whole pages or lie beyond `bytes`; else the driver's
  // reason.
  static Result<std::unique_ptr<Layout>> make(managed::RangeTable& ranges,
                                              const driver::Place& place,
                                              const std::vector<LayoutEntry>& entries,
                                              std::size_t bytes);
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;

  // The subrange for the next large allocation, of so many bytes in whole pages: its pages lead to
  // it now. kNoRange: it is served the ordinary way.
  RangeId take(std::size_t bytes, cu::CUstream stream);
  // The subrange's block is gone, on all streams.
  void give_back(RangeId subrange);
  void step_ended();
  // Serves no more: what is in it stays until it is freed.
  void retire() { retired_ = true; }
  bool idle() const { return taken_ == 0; }
  // Gives the range back to the driver; no subrange is taken.
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
