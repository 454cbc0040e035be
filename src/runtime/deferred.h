// The work that a thread which cannot wait for a device's lock leaves to the lock's holder:
// released blocks, and ends of steps. Requires the device's lock; does not wait for the device.
#pragma once
#include "runtime/state.h"

namespace umem::runtime {

// False: the device has no such block.
bool free_block(State& s, Slot& slot, void* ptr);
// Frees the blocks that were left to the slot.
void free_released(Slot& slot);
// Ends the steps that were left to the slot. This may wait for the device.
void end_steps(Slot& slot);

}  // namespace umem::runtime
