// Ranges that are cut into smaller pieces.
#pragma once
#include "runtime/state.h"

namespace umem::runtime {

// Cuts the range into pieces of the size that ranges of its size have by now, if it can be cut.
// Requires the device's lock.
void cut_as_others(State& s, Device& device, managed::RangeId id);

}  // namespace umem::runtime
