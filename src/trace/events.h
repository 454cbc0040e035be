// What the recorder hands out: one event a thing that happened, in the order in which it happened.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/export.h"

namespace umem::trace {

enum class EventKind : unsigned char { kAlloc, kOp, kFree, kStep };

// Strings stay valid for ever.
struct Event {
  EventKind kind = EventKind::kStep;
  std::uint32_t id = 0;                 // kAlloc, kFree
  const char* name = "";                // kOp: the operator; kAlloc: the tag
  const char* family = "";              // kOp, kAlloc
  std::size_t bytes = 0;                // kAlloc: as asked for
  std::uintptr_t address = 0;           // kAlloc
  int device = 0;                       // kAlloc
  float us = -1;                        // kOp: below 0 where it is not known
  std::uint32_t reads = 0, writes = 0;  // kOp: so many of the accesses that follow `first`
  std::uint64_t first = 0;
  bool helper = false;  // kAlloc, kOp: of a thread on which no steps run
};

// Bytes `begin` to `end` of a block are used by an access, and only those of such rows: without any
// it is the whole block.
struct Part {
  std::uint64_t access;  // counted as Event::first
  std::size_t begin, end;
};

struct Batch {
  std::vector<Event> events;
  std::vector<std::uint32_t> accesses;  // ids of blocks; Event::first counts from here
  std::vector<Part> parts;              // in the order of the events
  std::size_t before = 0;               // of the events: allocs of what was alive at the start
  std::uint64_t dropped = 0;            // events that there was no room for
};

// The events as lines of a trace file. `next_op` numbers the ops, and is moved on.
UMEM_API std::string to_json_lines(const Batch& batch, std::uint64_t& next_op);

}  // namespace umem::trace
