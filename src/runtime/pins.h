// Pins: what a program wants kept on the device, or left where it is.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/export.h"
#include "base/status.h"
#include "residency/tags.h"
#include "runtime/pin.h"

namespace umem::runtime {

// Each span lies in one block and is pinned until `remove_pins`, or until that block is released.
// Pins bring their units in first. kOutOfDeviceMemory where the budget does not have that much:
// nothing is pinned then. Returns a number for `remove_pins`. `labels` name the spans in messages.
UMEM_API Result<std::uint64_t> add_pins(const MemSpans& spans, PinKind kind,
                                        const std::vector<std::string>& labels);
// Ends what is left of them; a number that is not known, or not any more, is none.
UMEM_API void remove_pins(std::uint64_t number);
// Ends the newest pin of just this span. False: there is none.
UMEM_API bool unpin(managed::MemSpan span);
// Blocks that there are and will be, of these sizes (as asked for) and tag (kCount: any), are left
// where they are by policies until `remove_pins`.
UMEM_API Result<std::uint64_t> exempt_all(residency::Tag tag, std::size_t min_bytes,
                                          std::size_t max_bytes);

}  // namespace umem::runtime
