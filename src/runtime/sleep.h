// Sleep and wake of all devices.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/export.h"
#include "base/status.h"

namespace umem::runtime {

// Frees the device memory of blocks with these tags (bits by residency::Tag), and the cache; the
// driver has it when this returns. Pointers stay valid, and ops bring back the bytes that they
// need. `discard`: the bytes are lost instead of kept on the host. kBadState during an op or a
// graph's capture, kOutOfHostMemory if the host budget has no room, kNotSupported if memory cannot
// move; then nothing was moved.
struct Slept {
  std::uint64_t number = 0;  // for `wake`
  std::size_t bytes = 0;     // freed
  // True if the driver reports the bytes as free; otherwise it gives them to whoever allocates.
  bool released = true;
};
UMEM_API Status sleep(std::uint32_t tags, bool discard, Slept* slept);
// Brings back sleeping blocks of the tags, by last use, as far as they fit; of one sleep, or of all
// (0). Returns while the moves are under way; ops wait for the blocks that they use. `bytes`: the
// bytes brought back.
UMEM_API Status wake(std::uint32_t tags, std::uint64_t number, std::size_t* bytes);

}  // namespace umem::runtime
