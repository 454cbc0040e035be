// The victim callback: a function outside of umem, such as a Python policy, that names the units to
// evict.
//
// It is called without any lock of the runtime, because it may need a lock of its own (the
// interpreter's) that another thread holds while it calls umem. So the state may have changed when
// it returns: units that cannot be evicted by then are skipped.
#pragma once
#include <cstddef>

#include "base/export.h"
#include "runtime/op.h"
#include "runtime/shortage.h"

namespace umem::runtime {

struct State;
class DeviceLock;

// Null: no callback.
UMEM_API void set_victim_callback(VictimCallback callback) noexcept;

// Call the callback if memory is short. The lock is released meanwhile: nothing that was read under
// it is valid afterwards. The answer is used until it is cleared.
void ask_victims_for_inputs(State& s, const Input* inputs, std::size_t count, DeviceLock& lock);
void ask_victims_for_block(State& s, std::size_t bytes, DeviceLock& lock);

}  // namespace umem::runtime
