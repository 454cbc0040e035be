#include "managed/page_map.h"

#include <sys/mman.h>

#include "base/assert.h"

namespace umem::managed {

PageMap::PageMap() {
  void* memory = mmap(nullptr, kEntries * sizeof(std::uint32_t), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return;
  entries_ = static_cast<std::uint32_t*>(memory);
  size_ = kEntries;
}

PageMap::~PageMap() {
  if (entries_) munmap(entries_, kEntries * sizeof(std::uint32_t));
}

void PageMap::set(std::uintptr_t base, std::size_t bytes, std::uint32_t id) {
  const std::uintptr_t first = base >> kPageShift;
  UMEM_ASSERT(base % kPageBytes == 0 && bytes % kPageBytes == 0, "the map has whole pages");
  UMEM_ASSERT(first + (bytes >> kPageShift) <= size_, "the map covers the range");
  for (std::size_t i = 0; i < bytes >> kPageShift; ++i)
    __atomic_store_n(&entries_[first + i], id, __ATOMIC_RELEASE);
}

}  // namespace umem::managed
