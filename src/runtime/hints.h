// Hints: a program's requests for its own bytes, and queries for their placement. Units are moved
// whole.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/export.h"
#include "base/status.h"
#include "driver/types.h"
#include "managed/memory_ops.h"
#include "runtime/pin.h"

namespace umem::runtime {

// All hints refuse spans outside of umem's memory with kInvalidArgument, and then do nothing.
// Prefetches all of the spans, or as much as fits: kOutOfDeviceMemory.
UMEM_API Status prefetch(const MemSpans& spans);
// kBadState if an op is using a unit or the program pinned it; then nothing is evicted.
UMEM_API Status evict(const MemSpans& spans);
UMEM_API Status read_mostly(const MemSpans& spans, bool on);
// Makes the contents of the whole pages in the span indeterminate, like a kernel on `stream` that
// writes them. Returns the number of bytes: 0 if there is no whole page, or the driver cannot.
UMEM_API Result<std::size_t> discard(managed::MemSpan span, std::uintptr_t stream);
// The upper bound of that number.
UMEM_API Result<std::size_t> own_pages(managed::MemSpan span);
// The span's contents become those of a file, at byte `offset`, which is read when they are needed.
// False, and nothing happens, unless the span is all of a block that has pages of its own, and the
// block may be evicted now. kNotSupported without a disk; kInvalidArgument if the file cannot be
// read so.
UMEM_API Result<bool> place_in_file(managed::MemSpan span, const std::string& path,
                                    std::uint64_t offset);

// The placement of a span's bytes.
struct Placement {
  std::size_t bytes = 0;
  std::size_t resident = 0, evicted = 0, discarded = 0, unknown = 0;  // these add up to `bytes`
  std::size_t arriving = 0, leaving = 0;                              // parts of the first two
  std::uint32_t pins = 0;                                             // maximum over the units
  bool exempt = false, in_use = false;
  const char* tag = "";
  const char* family = "";
  std::string scope;
};
UMEM_API Result<Placement> placement_of(managed::MemSpan span);
// For each span: true if policies leave all of its live units in place; false if it has none.
UMEM_API std::vector<bool> kept_in_place(const MemSpans& spans);

struct PlacedBlock {
  std::uintptr_t address = 0;
  Placement at;  // of the requested bytes
};
// All live blocks, by address.
UMEM_API std::vector<PlacedBlock> placed_blocks();

// Sets the scope of the blocks that this thread allocates from now on; "" for none. Returns the
// previous scope.
UMEM_API std::string set_scope(const std::string& name);

// Units: large blocks or pieces of them, and segments of small ones.
struct BlockReport {
  std::uintptr_t base;
  std::size_t bytes;
  const char* tag;
  const char* family;
  const char* state;
  std::uint32_t pins;
};
UMEM_API std::vector<BlockReport> blocks();

}  // namespace umem::runtime
