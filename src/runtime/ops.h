// Op boundaries: called by torch_ext and the bindings at operator speed.
#pragma once
#include <cstddef>

#include "base/export.h"
#include "residency/tags.h"
#include "runtime/op.h"

namespace umem::runtime {

// Before an op runs: pushes it, pins the units of its inputs and fetches those that are away.
UMEM_API void op_begin(Op* op, const Input* inputs, std::size_t count) noexcept;
// After it, on the same thread: marks its inputs and what it allocated as used now, tags those of
// its blocks that outlive it (when `tag` is not kCount), unpins, and pops.
UMEM_API void op_end(Op* op, residency::Tag tag) noexcept;

}  // namespace umem::runtime
