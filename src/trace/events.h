// The recorder's output: one event per occurrence, in order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace umem::trace {

enum class EventKind : unsigned char { kAlloc, kOp, kFree, kStep };

// Strings remain valid forever.
struct Event {
  EventKind kind = EventKind::kStep;
  std::uint32_t id = 0;                 // kAlloc, kFree
  const char* name = "";                // kOp: the operator; kAlloc: the tag
  const char* family = "";              // kOp, kAlloc
  std::size_t bytes = 0;                // kAlloc: as requested
  std::uintptr_t address = 0;           // kAlloc
  int device = 0;                       // kAlloc
  float us = -1;                        // kOp: below 0 if unknown
  std::uint32_t reads = 0, writes = 0;  // kOp: counts of the accesses that follow `first`
  std::uint64_t first = 0;
  bool helper = false;  // kAlloc, kOp: on a thread that runs no steps
};

// An access uses only the bytes `begin` to `end` of such rows; without any, the whole block.
struct Part {
  std::uint64_t access;  // counted as Event::first
  std::size_t begin, end;
};

struct Batch {
  std::vector<Event> events;
  std::vector<std::uint32_t> accesses;  // ids of blocks; Event::first counts from here
  std::vector<Part> parts;              // in the order of the events
  std::size_t before = 0;               // leading events: allocs of blocks alive at the start
  std::uint64_t dropped = 0;            // events dropped because the log was full
};

}  // namespace umem::trace
