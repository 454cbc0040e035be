// Pins: spans that a program wants kept on the device, or left in place.
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

// Pins each span, which lies in one block, until `remove_pins` or the block's release. kPin brings
// the units in first. kOutOfDeviceMemory if the budget has no room for them; then nothing is
// pinned. Returns a number for `remove_pins`. `labels` name the spans in messages.
UMEM_API Result<std::uint64_t> add_pins(const MemSpans& spans, PinKind kind,
                                        const std::vector<std::string>& labels);
// Ends the remaining pins of that number; unknown numbers are ignored.
UMEM_API void remove_pins(std::uint64_t number);
// Ends the newest pin of exactly this span. False: there is none.
UMEM_API bool unpin(managed::MemSpan span);
// Exempts existing and future blocks of these requested sizes and this tag (kCount: any) from
// policies until `remove_pins`.
UMEM_API Result<std::uint64_t> exempt_all(residency::Tag tag, std::size_t min_bytes,
                                          std::size_t max_bytes);

}  // namespace umem::runtime
