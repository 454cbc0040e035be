#include "nccl/reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace softnccl {
namespace {

// Sums of these are rounded after each rank, as a ring's are.
struct Bfloat16 {
  std::uint16_t bits;
  operator float() const {
    const std::uint32_t wide = std::uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  static Bfloat16 of(float value) {
    std::uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    if (value != value) return {static_cast<std::uint16_t>((wide >> 16) | 64)};
    wide += 0x7fff + ((wide >> 16) & 1);  // to the nearest, ties to even
    return {static_cast<std::uint16_t>(wide >> 16)};
  }
};

template <class T>
struct Wide {
  using Type = T;
  static T back(T value) { return value; }
};
template <>
struct Wide<_Float16> {
  using Type = float;
  static _Float16 back(float value) { return static_cast<_Float16>(value); }
};
template <>
struct Wide<Bfloat16> {
  using Type = float;
  static Bfloat16 back(float value) { return Bfloat16::of(value); }
};

template <class W>
W combined(W a, W b, int op) {
  switch (op) {
    case kProduct:
      return static_cast<W>(a * b);
    case kMax:
      return std::max(a, b);
    case kMin:
      return std::min(a, b);
    default:
      return static_cast<W>(a + b);
  }
}

// Calls `act` with a null pointer to the element's type.
template <class Act>
bool with_type(int type, Act act) {
  switch (type) {
    case kInt8:
      return act(static_cast<std::int8_t*>(nullptr));
    case kUint8:
      return act(static_cast<std::uint8_t*>(nullptr));
    case kInt32:
      return act(static_cast<std::int32_t*>(nullptr));
    case kUint32:
      return act(static_cast<std::uint32_t*>(nullptr));
    case kInt64:
      return act(static_cast<std::int64_t*>(nullptr));
    case kUint64:
      return act(static_cast<std::uint64_t*>(nullptr));
    case kHalf:
      return act(static_cast<_Float16*>(nullptr));
    case kFloat:
      return act(static_cast<float*>(nullptr));
    case kDouble:
      return act(static_cast<double*>(nullptr));
    case kBfloat16:
      return act(static_cast<Bfloat16*>(nullptr));
    default:
      return false;
  }
}

}  // namespace

std::size_t size_of(int type) {
  std::size_t size = 0;
  with_type(type, [&]<class T>(T*) {
    size = sizeof(T);
    return true;
  });
  return size;
}

bool reduce(void* into, const void* from, std::size_t count, int type, int op) {
  if (op < kSum || op > kAverage) return false;
  return with_type(type, [&]<class T>(T*) {
    auto* a = static_cast<T*>(into);
    const auto* b = static_cast<const T*>(from);
    using W = typename Wide<T>::Type;
    for (std::size_t i = 0; i < count; ++i)
      a[i] = Wide<T>::back(combined<W>(static_cast<W>(a[i]), static_cast<W>(b[i]), op));
    return true;
  });
}

bool divide(void* into, std::size_t count, int type, unsigned ranks) {
  return with_type(type, [&]<class T>(T*) {
    auto* a = static_cast<T*>(into);
    using W = typename Wide<T>::Type;
    for (std::size_t i = 0; i < count; ++i)
      a[i] = Wide<T>::back(static_cast<W>(static_cast<W>(a[i]) / static_cast<W>(ranks)));
    return true;
  });
}

}  // namespace softnccl
