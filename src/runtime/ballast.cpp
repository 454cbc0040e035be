#include "runtime/ballast.h"

#include <algorithm>

#include "base/format.h"
#include "base/units.h"
#include "driver/memory_info.h"

namespace umem::runtime {

using driver::check;
using driver::Entry;

namespace {

constexpr std::size_t kLargest = 1024 * MiB;

}  // namespace

Ballast::~Ballast() {
  if (pieces_.empty()) return;
  const driver::CallScope scope(table_, place_);
  for (cu::CUdeviceptr piece : pieces_) table_.cuMemFree(piece);
}

Status Ballast::leave(std::size_t bytes) {
  Result<driver::MemoryInfo> memory = driver::memory_info(table_, place_);
  if (!memory.ok()) return memory.take_status();
  const auto [free_bytes, total_bytes] = memory.value();
  if (place_.integrated)
    return {Code::kNotSupported, "a device of " + format_bytes(bytes) +
                                     " was asked for, and this one's memory is the host's: give a "
                                     "budget instead"};
  if (bytes > total_bytes)
    return {Code::kInvalidArgument, "a device of " + format_bytes(bytes) +
                                        " was asked for, and the one there is has " +
                                        format_bytes(total_bytes)};
  const std::size_t held = align_up(total_bytes - bytes, kPageBytes);
  if (held >= free_bytes)
    return {Code::kOutOfDeviceMemory,
            "a device of " + format_bytes(bytes) + " was asked for, but other programs hold " +
                format_bytes(total_bytes - free_bytes) + " of this one: nothing would be left"};
  const driver::CallScope scope(table_, place_);
  for (std::size_t left = held; left > 0; left -= std::min(left, kLargest)) {
    cu::CUdeviceptr piece = 0;
    UMEM_RETURN_IF_ERROR(
        check(table_.cuMemAlloc(&piece, std::min(left, kLargest)), Entry::cuMemAlloc));
    pieces_.push_back(piece);
  }
  return {};
}

}  // namespace umem::runtime
