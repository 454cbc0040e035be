// What a program asks to be done with bytes of its own, and where they are. Units are moved whole.
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

// All of these refuse spans that are not in memory of umem's: kInvalidArgument, and nothing is
// done. Brings in all of it, or as much as there is room for: kOutOfDeviceMemory.
UMEM_API Status prefetch(const MemSpans& spans);
// kBadState where an op is using a unit, or the program pinned it: nothing is done then.
UMEM_API Status evict(const MemSpans& spans);
UMEM_API Status read_mostly(const MemSpans& spans, bool on);
// The whole pages inside the span become indeterminate, as by a kernel on `stream` that writes
// them. How many bytes: 0 where there is no whole page, or the driver cannot.
UMEM_API Result<std::size_t> discard(managed::MemSpan span, std::uintptr_t stream);
// How many bytes that would be at most.
UMEM_API Result<std::size_t> own_pages(managed::MemSpan span);

// Where the bytes of a span are.
struct Placement {
  std::size_t bytes = 0;
  std::size_t resident = 0, evicted = 0, discarded = 0, unknown = 0;  // together: bytes
  std::size_t arriving = 0, leaving = 0;                              // of the first two
  std::uint32_t pins = 0;                                             // the maximum of any unit
  bool exempt = false, in_use = false;
  const char* tag = "";
  const char* family = "";
  std::string scope;
};
UMEM_API Result<Placement> placement_of(managed::MemSpan span);
// Of each span whether policies leave all of its live units where they are; false where it has
// none.
UMEM_API std::vector<bool> kept_in_place(const MemSpans& spans);

struct PlacedBlock {
  std::uintptr_t address = 0;
  Placement at;  // of the bytes that were asked for
};
// All that are handed out, by address.
UMEM_API std::vector<PlacedBlock> placed_blocks();

// Blocks that this thread allocates from now on are of the scope; "": of none. Returns the one
// before.
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
