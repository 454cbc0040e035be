#pragma once
#include <cstddef>

namespace umem::soft {

inline constexpr std::size_t kMinFrames = 4;  // below 3 one instruction may never complete

// The location of a 2 MiB page.
enum class PageState : unsigned char { kVoid, kDevice, kHost, kDuplicate, kDiscarded };

}  // namespace umem::soft
