// An operator as the runtime is told of it. Only plain data, because torch_ext may be built by
// another compiler than this library.
#pragma once
#include <cstddef>
#include <cstdint>

#include "residency/tags.h"
#include "trace/op_timer.h"

namespace umem::runtime {

enum class Phase : unsigned char { kNone, kForward, kBackward, kOptimizer };

// What an op is given: a storage, and the part of it that the op uses. Null and foreign storages
// are ignored.
struct Input {
  const void* storage = nullptr;
  std::size_t offset = 0, bytes = 0;  // of the part; 0 bytes: all

  const void* begin() const { return static_cast<const char*>(storage) + offset; }
};

// One entry of the calling thread's op stack, on the caller's own stack or heap until op_end.
struct Op {
  residency::Family family = residency::Family::kNone;  // kNone: that of the enclosing op
  Phase phase = Phase::kNone;                           // kNone: that of the enclosing op
  // Encloses ops (an autograd node, an optimizer step), and is not an op itself.
  bool scope_marker = false;
  const char* name = "";  // stays valid for ever
  // Starts work on a stream of its own that uses what it was given after it has ended.
  bool collective = false;
  // What it uses are buffers of the exchange between ranks, where nobody said what else.
  bool exchanges = false;
  // Of the inputs: so many are written whole and not read, and so many, these included, are
  // written; they come first.
  std::uint32_t n_overwritten = 0, n_written = 0;
  int device = 0;             // that the op runs on,
  std::uintptr_t stream = 0;  // and its stream: inputs have to arrive there
  // Filled by op_begin.
  Op* parent = nullptr;
  std::uint32_t n_inputs = 0;  // of the pinned: the inputs; then what it allocated
  std::uint32_t n_pinned = 0;
  bool above_budget = false;  // what it uses at once
  bool operating = false;     // counted as one of those that use memory
  std::uint32_t pinned_capacity = 0;
  std::uint32_t* pinned = nullptr;
  std::uint32_t inline_pinned[16];
  trace::OpTimer trace;
};

}  // namespace umem::runtime
