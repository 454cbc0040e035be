// What the hooks report to the recorder, and the calls that start, stop and read it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/export.h"
#include "base/status.h"
#include "runtime/ops.h"
#include "trace/recorder.h"

namespace umem::runtime {

struct State;

// The lock is taken inside. kBadState where umem is off.
UMEM_API Status record_start(trace::Sink sink);
UMEM_API void record_stop(trace::Sink sink);
UMEM_API trace::Batch record_take(trace::Sink sink, bool all);
UMEM_API std::size_t record_waiting(trace::Sink sink);

// With the lock held, while it is recorded and the op is not a scope marker.
void record_begin(State& s, Op& op, const void* const* inputs, std::size_t count);
void record_end(Op& op, Op* parent, residency::Tag tag);

// As traces have it: "" for none.
const char* family_name(residency::Family family);

}  // namespace umem::runtime
