// The victim callback: a function outside, such as a policy in Python, that names what to evict.
//
// It is called while no lock of the runtime's is held, because it may need a lock of its own (the
// interpreter's) that another thread holds while it calls umem. So what it was shown may have
// changed when it answers: what cannot leave then is left out.
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

// Calls it where bytes are short, with the lock given up meanwhile: nothing that was read under it
// holds afterwards. The answer holds until it is forgotten.
void ask_victims_for_inputs(State& s, const Input* inputs, std::size_t count, DeviceLock& lock);
void ask_victims_for_block(State& s, std::size_t bytes, DeviceLock& lock);

}  // namespace umem::runtime
