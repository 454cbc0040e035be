// Ranges that are cut into smaller pieces.
#pragma once
#include "runtime/state.h"

namespace umem::runtime {

// Cuts the range into the smaller pieces that there are in ranges of its size by now, if it can be.
// With the device's lock.
void cut_as_others(State& s, Device& device, managed::RangeId id);

}  // namespace umem::runtime
