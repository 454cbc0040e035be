#include "backing/range_table.h"

namespace umem::backing {

using driver::check;
using driver::Entry;

Status RangeTable::reserve(std::size_t bytes, cu::CUdeviceptr& ptr) {
  if (!managed_) return check(table_.cuMemAlloc(&ptr, bytes), Entry::cuMemAlloc);
  return check(table_.cuMemAllocManaged(&ptr, bytes, cu::CU_MEM_ATTACH_GLOBAL),
               Entry::cuMemAllocManaged);
}

Result<RangeId> RangeTable::create(std::size_t bytes, const driver::Place& place) {
  if (bytes == 0) return Status(Code::kInvalidArgument, "a range of 0 bytes was asked for");
  if (!map_.ok()) return Status(Code::kOutOfHostMemory, "no address space for the page map");
  bytes = align_up(bytes, kPageBytes);
  if (limit_ > 0 && total_bytes_ + bytes > limit_)
    return Status(Code::kOutOfDeviceMemory,
                  "UMEM_GUARD keeps all managed memory within the device's free memory at start");
  const driver::CallScope scope(table_, place);
  cu::CUdeviceptr raw = 0;
  UMEM_RETURN_IF_ERROR(reserve(bytes, raw));
  std::uintptr_t base = raw;
  if (base % kPageBytes != 0) {
    // Whole pages are what can be evicted and discarded: take enough to cut an aligned range out.
    UMEM_RETURN_IF_ERROR(check(table_.cuMemFree(raw), Entry::cuMemFree));
    UMEM_RETURN_IF_ERROR(reserve(bytes + kPageBytes, raw));
    base = align_up(raw, kPageBytes);
  }
  if (!PageMap::covers(base, bytes)) {
    UMEM_RETURN_IF_ERROR(check(table_.cuMemFree(raw), Entry::cuMemFree));
    return Status(Code::kNotSupported, "the driver returned an address beyond 47 bits");
  }
  RangeId id;
  if (free_ids_.empty()) {
    id = static_cast<RangeId>(ranges_.size());
    ranges_.emplace_back();
  } else {
    id = free_ids_.back();
    free_ids_.pop_back();
  }
  ranges_[id] = {base, bytes, static_cast<std::uintptr_t>(raw), place.device};
  total_bytes_ += bytes;
  map_.set(base, bytes, id);
  return id;
}

Status RangeTable::destroy(RangeId id, const driver::Place& place) {
  const Range range = ranges_[id];
  const driver::CallScope scope(table_, place);
  map_.set(range.base, range.bytes, kNoRange);
  Status status = check(table_.cuMemFree(range.raw), Entry::cuMemFree);
  if (!status.ok()) {
    map_.set(range.base, range.bytes, id);
    return status;
  }
  total_bytes_ -= range.bytes;
  ranges_[id] = {};
  free_ids_.push_back(id);
  return {};
}

}  // namespace umem::backing
