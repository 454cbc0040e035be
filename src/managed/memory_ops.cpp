#include "managed/memory_ops.h"

#include <algorithm>
#include <utility>

namespace umem::managed {

using driver::check;
using driver::Entry;

namespace {

bool unsupported(cu::CUresult result) {
  return result == cu::CUDA_ERROR_NOT_FOUND || result == cu::CUDA_ERROR_NOT_SUPPORTED;
}

// True if the location was refused, rather than the call.
bool refused(cu::CUresult result) {
  return unsupported(result) || result == cu::CUDA_ERROR_INVALID_VALUE ||
         result == cu::CUDA_ERROR_INVALID_DEVICE || result == cu::CUDA_ERROR_NOT_PERMITTED;
}

cu::CUmemLocation location_of(Where where, int device) {
  if (where == Where::kHost) return {cu::CU_MEM_LOCATION_TYPE_HOST, 0};
  return {cu::CU_MEM_LOCATION_TYPE_DEVICE, device};
}

}  // namespace

MemoryOps::MemoryOps(const driver::Table& table, int device) : table_(table), device_(device) {}

cu::CUmemLocation MemoryOps::location(Where where) const {
  if (where == Where::kHost && host_node_ >= 0)
    return {cu::CU_MEM_LOCATION_TYPE_HOST_NUMA, host_node_};
  return location_of(where, device_);
}

void MemoryOps::to_pieces(const std::vector<MemSpan>& spans) {
  ptrs_.clear();
  sizes_.clear();
  for (const MemSpan& span : spans) {
    for (std::size_t at = 0; at < span.bytes; at += kPieceBytes) {
      ptrs_.push_back(span.base + at);
      sizes_.push_back(std::min(kPieceBytes, span.bytes - at));
    }
  }
}

// A result and its call.
cu::CUresult MemoryOps::prefetch_pieces(cu::CUmemLocation where, cu::CUstream stream,
                                        Entry& entry) {
  if (batched_) {
    std::size_t first = 0;
    entry = Entry::cuMemPrefetchBatchAsync;
    const cu::CUresult result = table_.cuMemPrefetchBatchAsync(
        ptrs_.data(), sizes_.data(), ptrs_.size(), &where, &first, 1, 0, stream);
    if (!unsupported(result)) return result;
    batched_ = false;
  }
  entry = Entry::cuMemPrefetchAsync;
  for (std::size_t i = 0; i < ptrs_.size(); ++i)
    if (const cu::CUresult result =
            table_.cuMemPrefetchAsync(ptrs_[i], sizes_[i], where, 0, stream);
        result != cu::CUDA_SUCCESS)
      return result;
  return cu::CUDA_SUCCESS;
}

Status MemoryOps::prefetch(const std::vector<MemSpan>& spans, Where to, cu::CUstream stream) {
  to_pieces(spans);
  if (ptrs_.empty()) return {};
  Entry entry = Entry::cuMemPrefetchBatchAsync;
  cu::CUresult result = prefetch_pieces(location(to), stream, entry);
  if (to == Where::kHost && host_node_ >= 0 && refused(result)) {
    const int node = std::exchange(host_node_, -1);  // for example one without memory
    result = prefetch_pieces(location(to), stream, entry);
    if (result != cu::CUDA_SUCCESS) host_node_ = node;
  }
  return check(result, entry);
}

Status MemoryOps::discard(const std::vector<MemSpan>& spans, cu::CUstream stream) {
  if (!can_discard_) return {};
  ptrs_.clear();
  sizes_.clear();
  for (const MemSpan& span : spans) {
    const std::uintptr_t begin = align_up(span.base, kPageBytes);
    const std::uintptr_t end = align_down(span.base + span.bytes, kPageBytes);
    if (begin >= end) continue;
    ptrs_.push_back(begin);
    sizes_.push_back(end - begin);
  }
  if (ptrs_.empty()) return {};
  const cu::CUresult result =
      table_.cuMemDiscardBatchAsync(ptrs_.data(), sizes_.data(), ptrs_.size(), 0, stream);
  if (!unsupported(result)) return check(result, Entry::cuMemDiscardBatchAsync);
  can_discard_ = false;
  return {};
}

Status MemoryOps::discard_and_prefetch(const std::vector<MemSpan>& spans, cu::CUstream stream) {
  if (!can_discard_) return prefetch(spans, Where::kDevice, stream);
  to_pieces(spans);
  if (ptrs_.empty()) return {};
  cu::CUmemLocation where = location(Where::kDevice);
  std::size_t first = 0;
  const cu::CUresult result = table_.cuMemDiscardAndPrefetchBatchAsync(
      ptrs_.data(), sizes_.data(), ptrs_.size(), &where, &first, 1, 0, stream);
  if (!unsupported(result)) return check(result, Entry::cuMemDiscardAndPrefetchBatchAsync);
  can_discard_ = false;
  return prefetch(spans, Where::kDevice, stream);
}

namespace {

Status advise(const driver::Table& table, MemSpan span, cu::CUmem_advise advice,
              cu::CUmemLocation location) {
  return check(table.cuMemAdvise(span.base, span.bytes, advice, location), Entry::cuMemAdvise);
}

// Ignored for advice without a location, but must be valid.
constexpr cu::CUmemLocation kAnywhere{cu::CU_MEM_LOCATION_TYPE_HOST, 0};

}  // namespace

Status advise_read_mostly(const driver::Table& table, MemSpan span) {
  if (span.bytes == 0) return {};
  return advise(table, span, cu::CU_MEM_ADVISE_SET_READ_MOSTLY, kAnywhere);
}

Status collapse_copies(const driver::Table& table, MemSpan span, Where stays, int device) {
  if (span.bytes == 0) return {};
  // Without a preferred location the driver may keep any of the copies.
  FirstError error;
  error.keep(
      advise(table, span, cu::CU_MEM_ADVISE_SET_PREFERRED_LOCATION, location_of(stays, device)));
  error.keep(advise(table, span, cu::CU_MEM_ADVISE_UNSET_READ_MOSTLY, kAnywhere));
  error.keep(advise(table, span, cu::CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, kAnywhere));
  return error.take();
}

Status advise_zero_copy(const driver::Table& table, MemSpan span, int device) {
  if (span.bytes == 0) return {};
  // The location first: pages that are mapped for the device before they have one may be moved
  // there.
  UMEM_RETURN_IF_ERROR(advise(table, span, cu::CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                              location_of(Where::kHost, device)));
  return advise(table, span, cu::CU_MEM_ADVISE_SET_ACCESSED_BY,
                location_of(Where::kDevice, device));
}

Status end_zero_copy(const driver::Table& table, MemSpan span, int device) {
  if (span.bytes == 0) return {};
  FirstError error;
  error.keep(advise(table, span, cu::CU_MEM_ADVISE_UNSET_ACCESSED_BY,
                    location_of(Where::kDevice, device)));
  error.keep(advise(table, span, cu::CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, kAnywhere));
  return error.take();
}

}  // namespace umem::managed
