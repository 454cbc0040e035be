// An operator as reported to the runtime. Only plain data, because torch_ext may be built by
// another compiler than this library.
#pragma once
#include <cstddef>
#include <cstdint>

#include "residency/tags.h"
#include "trace/op_timer.h"

namespace umem::runtime {

enum class Phase : unsigned char { kNone, kForward, kBackward, kOptimizer };

// An op's input: a storage, and the part of it that the op uses. Null storages are ignored, and
// foreign ones only counted.
struct Input {
  const void* storage = nullptr;
  std::size_t offset = 0, bytes = 0;  // the part; 0 bytes: the whole storage
  std::size_t size = 0;               // of the storage; 0: unknown
  bool on_gpu = false;

  const void* begin() const { return static_cast<const char*>(storage) + offset; }
};

// One entry of the calling thread's op stack, on the caller's own stack or heap until op_end.
struct Op {
  residency::Family family = residency::Family::kNone;  // kNone: inherited from the enclosing op
  Phase phase = Phase::kNone;                           // kNone: inherited from the enclosing op
  // Encloses ops (an autograd node, an optimizer step) but is not one itself.
  bool scope_marker = false;
  const char* name = "";  // valid forever
  // Starts work on its own stream that uses the inputs after the op has ended.
  bool collective = false;
  // Its operands are buffers of an exchange between ranks, unless tagged otherwise.
  bool exchanges = false;
  // The first `n_overwritten` inputs are written whole and not read; the first `n_written` inputs,
  // these included, are written.
  std::uint32_t n_overwritten = 0, n_written = 0;
  int device = 0;             // the op's device,
  std::uintptr_t stream = 0;  // and its stream, on which inputs must have arrived
  // Filled by op_begin.
  Op* parent = nullptr;
  std::uint32_t n_inputs = 0;  // pinned units that are inputs; the others were allocated in the op
  std::uint32_t n_pinned = 0;
  bool above_budget = false;  // its working set exceeds the budget
  bool operating = false;     // counted among the ops that use memory
  std::uint32_t pinned_capacity = 0;
  std::uint32_t* pinned = nullptr;
  std::uint32_t inline_pinned[16];
  trace::OpTimer trace;
};

}  // namespace umem::runtime
