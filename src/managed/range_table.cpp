#include "managed/range_table.h"

#include <algorithm>

#include "base/assert.h"

namespace umem::managed {

using driver::check;
using driver::Entry;

Status RangeTable::reserve(std::size_t bytes, cu::CUdeviceptr& ptr) {
  if (!managed_) return check(table_.cuMemAlloc(&ptr, bytes), Entry::cuMemAlloc);
  return check(table_.cuMemAllocManaged(&ptr, bytes, cu::CU_MEM_ATTACH_GLOBAL),
               Entry::cuMemAllocManaged);
}

RangeId RangeTable::take_ids(std::uint32_t count) {
  std::vector<RangeId>& free = free_ids_[count];
  if (!free.empty()) {
    const RangeId id = free.back();
    free.pop_back();
    UMEM_ASSERT(ranges_[id].pieces == 0 && ranges_[id].base == 0, "a free id is of no range");
    return id;
  }
  const auto id = static_cast<RangeId>(ranges_.size());
  ranges_.resize(ranges_.size() + count);
  return id;
}

std::size_t RangeTable::piece_bytes(RangeId id, std::size_t bytes) const {
  const Range& head = ranges_[ranges_[id].head];
  const std::size_t offset = ranges_[id].base - head.base;
  if (offset >= bytes) return 0;
  const bool last = id + 1 == ranges_[id].head + head.pieces;
  return last ? bytes - offset : std::min(bytes, ranges_[id + 1].base - head.base) - offset;
}

// Ids for the bytes, cut into pieces; the head's are those of all.
RangeId RangeTable::name_pieces(std::uintptr_t base, std::size_t bytes, std::size_t piece,
                                int device) {
  const auto pieces = static_cast<std::uint32_t>((bytes + piece - 1) / piece);
  const RangeId head = take_ids(pieces);
  for (std::uint32_t i = 0; i < pieces; ++i) {
    const std::size_t offset = i * piece;
    ranges_[head + i] = {base + offset, std::min(piece, bytes - offset), 0, device, head, 0};
  }
  ranges_[head].bytes = bytes;
  ranges_[head].pieces = pieces;
  return head;
}

RangeId RangeTable::add_subrange(RangeId range, std::size_t offset, std::size_t bytes) {
  return name_pieces(ranges_[range].base + offset, bytes, piece_, ranges_[range].device);
}

void RangeTable::remove_subrange(RangeId subrange) {
  const std::uint32_t pieces = ranges_[subrange].pieces;
  UMEM_ASSERT(pieces > 0, "a subrange is removed by its first id, once");
  UMEM_ASSERT(map_.find(ranges_[subrange].base) != subrange,
              "a subrange is hidden before it is removed");
  for (std::uint32_t i = 0; i < pieces; ++i) ranges_[subrange + i] = {};
  free_ids_[pieces].push_back(subrange);
}

void RangeTable::show_subrange(RangeId subrange) {
  const std::size_t bytes = ranges_[subrange].bytes;
  UMEM_ASSERT(unseen(subrange, map_.find(ranges_[subrange].base)),
              "ranges, and shown subranges, do not overlap");
  each_piece(subrange, [&](RangeId piece) {
    map_.set(ranges_[piece].base, piece_bytes(piece, bytes), piece);
  });
}

bool RangeTable::unseen(RangeId subrange, RangeId range) const {
  const Range& at = ranges_[subrange];
  for (std::size_t offset = 0; offset < at.bytes; offset += kPageBytes)
    if (map_.find(at.base + offset) != range) return false;
  return true;
}

Result<RangeId> RangeTable::create(std::size_t bytes, const driver::Place& place,
                                   std::size_t piece) {
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
    return Status(Code::kNotSupported, "the driver returned an address beyond 48 bits");
  }
  if (piece == 0) piece = piece_;
  const RangeId head = name_pieces(base, bytes, managed_ ? piece : bytes, place.device);
  ranges_[head].raw = static_cast<std::uintptr_t>(raw);
  show_subrange(head);
  total_bytes_ += bytes;
  return head;
}

Status RangeTable::destroy(RangeId id, const driver::Place& place) {
  const Range range = ranges_[id];
  UMEM_ASSERT(range.pieces > 0 && range.head == id, "a range is destroyed by its first id, once");
  UMEM_ASSERT(total_bytes_ >= range.bytes, "the bytes of a range are counted");
  const driver::CallScope scope(table_, place);
  map_.set(range.base, range.bytes, kNoRange);
  Status status = check(table_.cuMemFree(range.raw), Entry::cuMemFree);
  if (!status.ok()) {
    each_piece(id, [&](RangeId piece) {
      const std::size_t size = piece_bytes(piece, range.bytes);
      map_.set(ranges_[piece].base, size, piece);
    });
    return status;
  }
  total_bytes_ -= range.bytes;
  for (std::uint32_t i = 0; i < range.pieces; ++i) ranges_[id + i] = {};
  free_ids_[range.pieces].push_back(id);
  return {};
}

}  // namespace umem::managed
