// The pages for which the driver holds device memory, as far as umem's own calls tell. On a GPU an
// evicted 2 MiB page keeps its memory: the driver takes it back when the range is freed, or when
// nothing else is free (open-gpu-kernel-modules 595.45.04, uvm_va_block.c and uvm_pmm_gpu.c:
// "unused" chunks). The driver may have given it to others since, so this is an upper bound.
#pragma once
#include <cstddef>
#include <cstdint>
#include <unordered_set>

#include "base/units.h"
#include "managed/memory_ops.h"

namespace umem::managed {

class AttachedPages {
 public:
  void attach(MemSpan span) {
    each(span, [this](std::uintptr_t page) { pages_.insert(page); });
  }
  void detach(MemSpan span) {
    each(span, [this](std::uintptr_t page) { pages_.erase(page); });
  }
  void clear() { pages_.clear(); }
  std::size_t bytes() const { return pages_.size() << kPageShift; }

 private:
  template <class Act>
  static void each(MemSpan span, Act act) {
    for (std::size_t offset = 0; offset < span.bytes; offset += kPageBytes)
      act((span.base + offset) >> kPageShift);
  }

  std::unordered_set<std::uintptr_t> pages_;
};

}  // namespace umem::managed
