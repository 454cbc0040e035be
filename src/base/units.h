// Sizes and alignment shared by every floor.
#pragma once
#include <cstddef>
#include <cstdint>

namespace umem {

inline constexpr std::size_t KiB = std::size_t{1} << 10;
inline constexpr std::size_t MiB = std::size_t{1} << 20;
inline constexpr std::size_t GiB = std::size_t{1} << 30;

// The driver's VA block: its unit of eviction and discard, and the software device's frame.
inline constexpr unsigned kPageShift = 21;
inline constexpr std::size_t kPageBytes = std::size_t{1} << kPageShift;

// The maximum size of one transfer, and of a block that is in one place.
inline constexpr std::size_t kPieceBytes = 64 * MiB;

constexpr std::size_t align_up(std::size_t n, std::size_t alignment) {
  return (n + alignment - 1) / alignment * alignment;
}
constexpr std::size_t align_down(std::size_t n, std::size_t alignment) {
  return n / alignment * alignment;
}
constexpr std::size_t pages_of(std::size_t bytes) {
  return (bytes + kPageBytes - 1) >> kPageShift;
}

}  // namespace umem
