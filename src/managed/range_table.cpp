#include "managed/range_table.h"

#include <algorithm>
#include <bit>

#include "base/assert.h"

namespace umem::managed {

using driver::check;
using driver::Entry;

namespace {

constexpr std::size_t kMostPieces = 128;  // of a range that is cut finer

}  // namespace

std::size_t range_bytes(std::size_t block) {
  const std::size_t pages = pages_of(block);
  if (pages <= 16) return pages << kPageShift;
  const std::size_t step = std::bit_floor(pages) / 8;
  return align_up(pages, step) << kPageShift;
}

Status RangeTable::reserve(std::size_t bytes, int device, cu::CUdeviceptr& ptr) {
  if (uses_mapped_) {
    Result<cu::CUdeviceptr> addresses = mapped_.reserve(bytes, device);
    if (addresses.ok()) ptr = addresses.value();
    return addresses.take_status();
  }
  if (!managed_) return check(table_.cuMemAlloc(&ptr, bytes), Entry::cuMemAlloc);
  return check(table_.cuMemAllocManaged(&ptr, bytes, cu::CU_MEM_ATTACH_GLOBAL),
               Entry::cuMemAllocManaged);
}

Status RangeTable::release(std::uintptr_t raw) const {
  if (uses_mapped_) return mapped_.free(raw);
  return check(table_.cuMemFree(raw), Entry::cuMemFree);
}

// With the first block, because kNoRange has an entry too.
RangeTable::RangeTable(const driver::Table& table)
    : table_(table), blocks_(new std::atomic<Range*>[kBlocks]()) {
  blocks_[0].store(new Range[kBlock]);
}

RangeTable::~RangeTable() {
  for (std::uint32_t block = 0; block < kBlocks; ++block) delete[] blocks_[block].load();
}

bool RangeTable::ids_for(std::size_t bytes) const {
  const std::lock_guard guard(mutex_);
  // A range has at most one id per page.
  return bytes >> kPageShift < std::size_t{kBlocks} * kBlock - next_id_ + free_ids_.size();
}

RangeId RangeTable::take_id() {
  const std::lock_guard guard(mutex_);
  if (!free_ids_.empty()) {
    const RangeId id = free_ids_.back();
    free_ids_.pop_back();
    UMEM_ASSERT(at(id).pieces == 0 && at(id).base == 0, "a free id is of no range");
    return id;
  }
  const RangeId id = next_id_++;
  if (std::atomic<Range*>& block = blocks_[id >> kBlockBits];
      !block.load(std::memory_order_relaxed))
    block.store(new Range[kBlock], std::memory_order_release);
  return id;
}

// `device_of` may read the device meanwhile, for an address that belonged to an earlier range here.
void RangeTable::set(RangeId id, const Range& range) {
  Range& to = at(id);
  to.base = range.base;
  to.bytes = range.bytes;
  to.raw = range.raw;
  __atomic_store_n(&to.device, range.device, __ATOMIC_RELAXED);
  to.head = range.head;
  to.next = range.next;
  to.pieces = range.pieces;
}

std::size_t RangeTable::total_bytes() const {
  const std::lock_guard guard(mutex_);
  std::size_t bytes = 0;
  for (const auto& [device, total] : totals_) bytes += total.bytes;
  return bytes;
}

std::size_t RangeTable::piece_bytes(RangeId id, std::size_t bytes) const {
  const Range& head = at(at(id).head);
  const std::size_t offset = at(id).base - head.base;
  if (offset >= bytes) return 0;
  const RangeId next = at(id).next;
  return (next == kNoRange ? bytes : std::min(bytes, at(next).base - head.base)) - offset;
}

void RangeTable::cut_finer(std::size_t block) {
  const std::lock_guard guard(mutex_);
  cut_sizes_.insert(range_bytes(block));
}

void RangeTable::forget_cuts() {
  const std::lock_guard guard(mutex_);
  cut_sizes_.clear();
}

std::vector<std::size_t> RangeTable::cut_sizes() const {
  const std::lock_guard guard(mutex_);
  return {cut_sizes_.begin(), cut_sizes_.end()};
}

// Whole pages, and few enough pieces that planning a step stays fast. Mapped memory is not cut
// finer: it moves as it was placed, and each piece costs driver calls.
std::size_t RangeTable::piece_of(std::size_t block, bool finer) const {
  if (!finer || uses_mapped_) return piece_;
  const std::size_t least = std::bit_ceil(range_bytes(block) / kMostPieces);
  return std::min<std::size_t>(piece_, std::max(kPageBytes, least));
}

std::size_t RangeTable::piece_of(std::size_t block) const {
  const std::lock_guard guard(mutex_);
  return piece_of(block, cut_sizes_.contains(range_bytes(block)));
}

// Makes ids for the pieces of the bytes; the head's fields describe all of them.
RangeId RangeTable::name_pieces(std::uintptr_t base, std::size_t bytes, std::size_t piece,
                                int device) {
  const RangeId head = take_id();
  set(head, {base, bytes, 0, device, head, kNoRange, 1});
  for (RangeId last = head; last != kNoRange;) last = split(last, piece);
  return head;
}

// Cuts the piece after `bytes`. Returns the id of the rest, kNoRange if there is none.
RangeId RangeTable::split(RangeId id, std::size_t bytes) {
  const RangeId head = at(id).head;
  const std::size_t whole = piece_bytes(id, at(head).bytes);
  if (whole <= bytes) return kNoRange;
  const RangeId rest = take_id();
  const std::uintptr_t base = at(id).base + bytes;
  set(rest, {base, whole - bytes, 0, at(id).device, head, at(id).next, 0});
  at(id).next = rest;
  if (id != head) at(id).bytes = bytes;
  ++at(head).pieces;
  if (map_.find(at(id).base) == id) map_.set(base, whole - bytes, rest);
  return rest;
}

RangeId RangeTable::add_subrange(RangeId range, std::size_t offset, std::size_t bytes) {
  return name_pieces(at(range).base + offset, bytes, piece_of(bytes), at(range).device);
}

void RangeTable::remove_subrange(RangeId subrange) {
  UMEM_ASSERT(at(subrange).pieces > 0, "a subrange is removed by its first id, once");
  UMEM_ASSERT(map_.find(at(subrange).base) != subrange,
              "a subrange is hidden before it is removed");
  give_back_ids(subrange);
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
  if (!ids_for(bytes))
    return Status(Code::kOutOfHostMemory, "there are no more ids for managed ranges");
  UMEM_RETURN_IF_ERROR(count(bytes, place.device));
  std::uintptr_t base = 0;
  Result<cu::CUdeviceptr> raw = [&] {
    const driver::CallScope scope(table_, place);
    return reserve_aligned(bytes, place.device, base);
  }();
  if (!raw.ok()) {
    freed(bytes, place.device);
    return raw.take_status();
  }
  if (piece == 0) piece = piece_of(bytes);
  const RangeId head = name_pieces(base, bytes, managed_ ? piece : bytes, place.device);
  at(head).raw = static_cast<std::uintptr_t>(raw.value());
  show_subrange(head);
  return head;
}

// Only whole pages can be evicted and discarded: if the driver's address is not page-aligned,
// allocates enough to contain an aligned range.
Result<cu::CUdeviceptr> RangeTable::reserve_aligned(std::size_t bytes, int device,
                                                    std::uintptr_t& base) {
  cu::CUdeviceptr raw = 0;
  UMEM_RETURN_IF_ERROR(reserve(bytes, device, raw));
  base = raw;
  if (base % kPageBytes != 0) {
    UMEM_RETURN_IF_ERROR(release(raw));
    UMEM_RETURN_IF_ERROR(reserve(bytes + kPageBytes, device, raw));
    base = align_up(raw, kPageBytes);
  }
  if (!PageMap::covers(base, bytes)) {
    UMEM_RETURN_IF_ERROR(release(raw));
    return Status(Code::kNotSupported, "the driver returned an address beyond 48 bits");
  }
  return raw;
}

void RangeTable::set_limit(std::size_t bytes, int device) {
  const std::lock_guard guard(mutex_);
  totals_[device].limit = bytes;
}

Status RangeTable::count(std::size_t bytes, int device) {
  const std::lock_guard guard(mutex_);
  Total& total = totals_[device];
  if (total.limit > 0 && total.bytes + bytes > total.limit)
    return {Code::kOutOfDeviceMemory, kGuardRefusal};
  total.bytes += bytes;
  return {};
}

void RangeTable::freed(std::size_t bytes, int device) {
  const std::lock_guard guard(mutex_);
  Total& total = totals_[device];
  UMEM_ASSERT(total.bytes >= bytes, "the bytes of a range are counted");
  total.bytes -= bytes;
}

void RangeTable::give_back_ids(RangeId head) {
  // The device field stays: its former addresses are looked up under that device's lock, which
  // finds nothing.
  for (RangeId id = head; id != kNoRange;) {
    Range nothing;
    nothing.device = at(id).device;
    const RangeId next = at(id).next;
    set(id, nothing);
    const std::lock_guard guard(mutex_);
    free_ids_.push_back(id);
    id = next;
  }
}

Status RangeTable::destroy(RangeId id, const driver::Place& place, Freer* freer) {
  const Range range = at(id);
  UMEM_ASSERT(range.pieces > 0 && range.head == id, "a range is destroyed by its first id, once");
  map_.set(range.base, range.bytes, kNoRange);
  if (freer) {
    give_back_ids(id);
    freer->add(range.raw, range.bytes);
    return {};
  }
  const driver::CallScope scope(table_, place);
  if (Status status = release(range.raw); !status.ok()) {
    each_piece(id, [&](RangeId piece) {
      map_.set(at(piece).base, piece_bytes(piece, range.bytes), piece);
    });
    return status;
  }
  give_back_ids(id);
  freed(range.bytes, place.device);
  return {};
}

}  // namespace umem::managed
