// Events as JSON lines; docs/trace_format.md describes the keys.
#pragma once
#include <cstdint>
#include <string>

#include "base/export.h"
#include "trace/events.h"

namespace umem::trace {

// The events as lines of a trace file. `next_op` numbers the ops, and is moved on.
UMEM_API std::string to_json_lines(const Batch& batch, std::uint64_t& next_op);

}  // namespace umem::trace
