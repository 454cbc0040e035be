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

// With a first block: kNoRange has an entry too.
RangeTable::RangeTable(const driver::Table& table)
    : table_(table), blocks_(new std::atomic<Range*>[kBlocks]()) {
  blocks_[0].store(new Range[kBlock]);
}

RangeTable::~RangeTable() {
  for (std::uint32_t block = 0; block < kBlocks; ++block) delete[] blocks_[block].load();
}

// Of ids in a row, which may lie in two blocks.
RangeId RangeTable::take_ids(std::uint32_t count) {
  const std::lock_guard guard(mutex_);
  std::vector<RangeId>& free = free_ids_[count];
  if (!free.empty()) {
    const RangeId id = free.back();
    free.pop_back();
    UMEM_ASSERT(at(id).pieces == 0 && at(id).base == 0, "a free id is of no range");
    return id;
  }
  const RangeId id = next_id_;
  next_id_ += count;
  for (RangeId block = id >> kBlockBits; block <= (next_id_ - 1) >> kBlockBits; ++block)
    if (!blocks_[block].load(std::memory_order_relaxed))
      blocks_[block].store(new Range[kBlock], std::memory_order_release);
  return id;
}

// `device_of` may read the device meanwhile, for an address that was of a range here before.
void RangeTable::set(RangeId id, const Range& range) {
  Range& to = at(id);
  to.base = range.base;
  to.bytes = range.bytes;
  to.raw = range.raw;
  __atomic_store_n(&to.device, range.device, __ATOMIC_RELAXED);
  to.head = range.head;
  to.pieces = range.pieces;
}

std::size_t RangeTable::total_bytes() const {
  const std::lock_guard guard(mutex_);
  return total_bytes_;
}

std::size_t RangeTable::piece_bytes(RangeId id, std::size_t bytes) const {
  const Range& head = at(at(id).head);
  const std::size_t offset = at(id).base - head.base;
  if (offset >= bytes) return 0;
  const bool last = id + 1 == at(id).head + head.pieces;
  return last ? bytes - offset : std::min(bytes, at(id + 1).base - head.base) - offset;
}

// Ids for the bytes, cut into pieces; the head's are those of all.
RangeId RangeTable::name_pieces(std::uintptr_t base, std::size_t bytes, std::size_t piece,
                                int device) {
  const auto pieces = static_cast<std::uint32_t>((bytes + piece - 1) / piece);
  const RangeId head = take_ids(pieces);
  for (std::uint32_t i = 0; i < pieces; ++i) {
    const std::size_t offset = i * piece;
    set(head + i, {base + offset, std::min(piece, bytes - offset), 0, device, head, 0});
  }
  at(head).bytes = bytes;
  at(head).pieces = pieces;
  return head;
}

RangeId RangeTable::add_subrange(RangeId range, std::size_t offset, std::size_t bytes) {
  return name_pieces(at(range).base + offset, bytes, piece_, at(range).device);
}

void RangeTable::remove_subrange(RangeId subrange) {
  const std::uint32_t pieces = at(subrange).pieces;
  UMEM_ASSERT(pieces > 0, "a subrange is removed by its first id, once");
  UMEM_ASSERT(map_.find(at(subrange).base) != subrange,
              "a subrange is hidden before it is removed");
  give_back_ids(subrange, pieces);
}

void RangeTable::show_subrange(RangeId subrange) {
  const std::size_t bytes = at(subrange).bytes;
  UMEM_ASSERT(unseen(subrange, map_.find(at(subrange).base)),
              "ranges, and shown subranges, do not overlap");
  each_piece(subrange,
             [&](RangeId piece) { map_.set(at(piece).base, piece_bytes(piece, bytes), piece); });
}

bool RangeTable::unseen(RangeId subrange, RangeId range) const {
  const Range& place = at(subrange);
  for (std::size_t offset = 0; offset < place.bytes; offset += kPageBytes)
    if (map_.find(place.base + offset) != range) return false;
  return true;
}

Result<RangeId> RangeTable::create(std::size_t bytes, const driver::Place& place,
                                   std::size_t piece) {
  if (bytes == 0) return Status(Code::kInvalidArgument, "a range of 0 bytes was asked for");
  if (!map_.ok()) return Status(Code::kOutOfHostMemory, "no address space for the page map");
  bytes = align_up(bytes, kPageBytes);
  UMEM_RETURN_IF_ERROR(count(bytes));
  std::uintptr_t base = 0;
  Result<cu::CUdeviceptr> raw = [&] {
    const driver::CallScope scope(table_, place);
    return reserve_aligned(bytes, base);
  }();
  if (!raw.ok()) {
    freed(bytes);
    return raw.take_status();
  }
  if (piece == 0) piece = piece_;
  const RangeId head = name_pieces(base, bytes, managed_ ? piece : bytes, place.device);
  at(head).raw = static_cast<std::uintptr_t>(raw.value());
  show_subrange(head);
  return head;
}

// Whole pages are what can be evicted and discarded: where the driver's address is of no page's
// beginning, takes enough to cut an aligned range out.
Result<cu::CUdeviceptr> RangeTable::reserve_aligned(std::size_t bytes, std::uintptr_t& base) {
  cu::CUdeviceptr raw = 0;
  UMEM_RETURN_IF_ERROR(reserve(bytes, raw));
  base = raw;
  if (base % kPageBytes != 0) {
    UMEM_RETURN_IF_ERROR(check(table_.cuMemFree(raw), Entry::cuMemFree));
    UMEM_RETURN_IF_ERROR(reserve(bytes + kPageBytes, raw));
    base = align_up(raw, kPageBytes);
  }
  if (!PageMap::covers(base, bytes)) {
    UMEM_RETURN_IF_ERROR(check(table_.cuMemFree(raw), Entry::cuMemFree));
    return Status(Code::kNotSupported, "the driver returned an address beyond 48 bits");
  }
  return raw;
}

Status RangeTable::count(std::size_t bytes) {
  const std::lock_guard guard(mutex_);
  if (limit_ > 0 && total_bytes_ + bytes > limit_)
    return {Code::kOutOfDeviceMemory,
            "UMEM_GUARD keeps all managed memory within the device's free memory at start"};
  // A range has at most an id for each page.
  if (bytes >> kPageShift >= std::size_t{kBlocks} * kBlock - next_id_)
    return {Code::kOutOfHostMemory, "there are no more ids for managed ranges"};
  total_bytes_ += bytes;
  return {};
}

void RangeTable::freed(std::size_t bytes) {
  const std::lock_guard guard(mutex_);
  UMEM_ASSERT(total_bytes_ >= bytes, "the bytes of a range are counted");
  total_bytes_ -= bytes;
}

void RangeTable::give_back_ids(RangeId first, std::uint32_t count) {
  // The device stays: an address that was of it is looked up under its lock, which finds nothing.
  for (std::uint32_t i = 0; i < count; ++i) {
    Range nothing;
    nothing.device = at(first + i).device;
    set(first + i, nothing);
  }
  const std::lock_guard guard(mutex_);
  free_ids_[count].push_back(first);
}

Status RangeTable::destroy(RangeId id, const driver::Place& place, Freer* freer) {
  const Range range = at(id);
  UMEM_ASSERT(range.pieces > 0 && range.head == id, "a range is destroyed by its first id, once");
  map_.set(range.base, range.bytes, kNoRange);
  if (freer) {
    give_back_ids(id, range.pieces);
    freer->add(range.raw, range.bytes);
    return {};
  }
  const driver::CallScope scope(table_, place);
  if (Status status = check(table_.cuMemFree(range.raw), Entry::cuMemFree); !status.ok()) {
    each_piece(id, [&](RangeId piece) {
      map_.set(at(piece).base, piece_bytes(piece, range.bytes), piece);
    });
    return status;
  }
  give_back_ids(id, range.pieces);
  freed(range.bytes);
  return {};
}

}  // namespace umem::managed
