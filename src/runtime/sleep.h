// Sleep and wake of all devices.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/export.h"
#include "base/status.h"

namespace umem::runtime {

// Gives back the device memory of what has these tags (bits by residency::Tag), and all
// that is cached: when it returns, the driver has it. Pointers stay valid, and an op brings back
// what it needs. `discard`: the bytes are lost instead of kept on the host. kBadState in the middle
// of an op or of a graph's capture, kOutOfHostMemory where the host budget has no room,
// kNotSupported where memory cannot move: nothing was moved then.
struct Slept {
  std::uint64_t number = 0;  // for `wake`
  std::size_t bytes = 0;     // given back
  // Whether the driver shows them as free; else it gives them to whoever allocates.
  bool released = true;
};
UMEM_API Status sleep(std::uint32_t tags, bool discard, Slept* slept);
// Brings back what sleeps of the tags, by last use, as far as it fits; of one sleep, or (0) of all.
// The moves are under way when it returns, and ops wait for what they use. `bytes`: of them.
UMEM_API Status wake(std::uint32_t tags, std::uint64_t number, std::size_t* bytes);

}  // namespace umem::runtime
