// What a thread that cannot wait for a device's lock leaves to its holder: released blocks, and
// ends of steps. All of it with the device's lock, and without waiting for the device.
#pragma once
#include "runtime/state.h"

namespace umem::runtime {

// False: the device has no such block.
bool free_block(State& s, Slot& slot, void* ptr);
// Frees the blocks that were left to the slot.
void free_released(Slot& slot);
// Ends the steps that were left to the slot. An end of a step may wait for the device.
void end_steps(Slot& slot);

}  // namespace umem::runtime
