// The verbs on managed bytes: prefetch, discard, advise, each in the batch form where the driver
// has it and range by range where it does not. Ranges of zero bytes are dropped, since a
// zero-size prefetch leaves a real context in an error state.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "base/units.h"
#include "driver/table.h"

namespace umem::managed {

struct MemSpan {
  std::uintptr_t base = 0;
  std::size_t bytes = 0;
};
enum class Where { kDevice, kHost };

class MemoryOps {
 public:
  MemoryOps(const driver::Table& table, int device);

  // What is prefetched to the host goes to this NUMA node while it has room, then to any (UVM's
  // block_alloc_cpu_chunk); -1: to that of the thread that calls.
  void set_host_node(int node) { host_node_ = node; }

  // Stream-ordered; never on the legacy NULL stream, which the batch calls refuse.
  Status prefetch(const std::vector<MemSpan>& spans, Where to, cu::CUstream stream);
  // The bytes become indeterminate. Spans are shrunk to whole pages. No-op without driver support.
  Status discard(const std::vector<MemSpan>& spans, cu::CUstream stream);
  // Populates on the device without a copy what is dead anyway; a prefetch where unsupported.
  Status discard_and_prefetch(const std::vector<MemSpan>& spans, cu::CUstream stream);
  bool can_discard() const { return can_discard_; }

 private:
  cu::CUmemLocation location(Where where) const;
  cu::CUresult prefetch_pieces(cu::CUmemLocation where, cu::CUstream stream, driver::Entry& entry);
  void to_pieces(const std::vector<MemSpan>& spans);

  const driver::Table& table_;
  int device_;
  int host_node_ = -1;
  bool batched_ = true;
  bool can_discard_ = true;
  std::vector<cu::CUdeviceptr> ptrs_;
  std::vector<std::size_t> sizes_;
};

// What is read stays on both sides, until it is written.
Status advise_read_mostly(const driver::Table& table, MemSpan span);
// The end of that: of what is on both sides the copy on the side `stays` is kept, the other one
// goes without a transfer. What is on one side only stays there.
Status collapse_copies(const driver::Table& table, MemSpan span, Where stays, int device);
// What is on the host is used there by the device, without a page fault. A prefetch moves it as
// ever.
Status advise_zero_copy(const driver::Table& table, MemSpan span, int device);
Status end_zero_copy(const driver::Table& table, MemSpan span, int device);

}  // namespace umem::managed
