// Operations on managed bytes: prefetch, discard, advise. In batches if the driver has them, and
// range by range otherwise. Ranges of zero bytes are dropped, because a zero-size prefetch leaves a
// real context in an error state.
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

  // The NUMA node for prefetches to the host while it has room, then any node (UVM's
  // block_alloc_cpu_chunk); -1: the calling thread's node.
  void set_host_node(int node) { host_node_ = node; }

  // Stream-ordered; never on the legacy NULL stream, which the batch calls refuse.
  Status prefetch(const std::vector<MemSpan>& spans, Where to, cu::CUstream stream);
  // The bytes become indeterminate. Spans are shrunk to whole pages. No-op without driver support.
  Status discard(const std::vector<MemSpan>& spans, cu::CUstream stream);
  // Populates dead bytes on the device without a copy; a prefetch if unsupported.
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

// Bytes that are read are kept on both sides until a write.
Status advise_read_mostly(const driver::Table& table, MemSpan span);
// Ends that: for bytes on both sides, keeps the copy on the side `stays`, and drops the other one
// without a transfer. Bytes on one side stay there.
Status collapse_copies(const driver::Table& table, MemSpan span, Where stays, int device);
// The device uses bytes that are on the host there, without page faults. Prefetches still move
// them.
Status advise_zero_copy(const driver::Table& table, MemSpan span, int device);
Status end_zero_copy(const driver::Table& table, MemSpan span, int device);

}  // namespace umem::managed
