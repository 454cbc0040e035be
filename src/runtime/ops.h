// Op boundaries: called by torch_ext and the bindings at operator speed.
#pragma once
#include <cstddef>

#include "base/export.h"
#include "residency/tags.h"
#include "runtime/op.h"

namespace umem::runtime {

// Call it before an op runs: pushes the op, pins its inputs' units and fetches those that are away.
UMEM_API void op_begin(Op* op, const Input* inputs, std::size_t count) noexcept;
// Call it after the op, on the same thread: marks its inputs and allocations as used now, tags
// those of its blocks that outlive it (unless `tag` is kCount), unpins, and pops.
UMEM_API void op_end(Op* op, residency::Tag tag) noexcept;

}  // namespace umem::runtime
