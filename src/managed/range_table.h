// Managed ranges: whole 2 MiB pages of address space from cuMemAllocManaged, each with a small id,
// and the map from any address to its range. Where managed memory cannot be used, plain device
// memory.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "base/assert.h"
#include "base/status.h"
#include "base/units.h"
#include "driver/place.h"
#include "driver/table.h"
#include "managed/freer.h"
#include "managed/page_map.h"

namespace umem::managed {

using RangeId = std::uint32_t;
inline constexpr RangeId kNoRange = 0;  // ids start at 1

// Address space of a large block: whole pages up to 32 MiB, then eighths of a power of two, so
// that ranges fit later requests of nearly the same size. Pages beyond the request are never
// touched and so take no memory.
std::size_t range_bytes(std::size_t block);

// A range is one allocation of the driver. What is larger than a piece has several ids, the range's
// own and one for each further piece, so that its bytes can be in several places.
struct Range {
  std::uintptr_t base = 0;  // 2 MiB-aligned; of a further piece, where it begins
  std::size_t bytes = 0;    // a multiple of 2 MiB; of a further piece, its own
  std::uintptr_t raw = 0;   // what the driver returned (differs when it was not aligned)
  int device = 0;
  RangeId head = kNoRange;   // the range that this is a piece of, or itself
  RangeId next = kNoRange;   // the piece that follows it there
  std::uint32_t pieces = 0;  // of a head; of a further piece 0
};

// Several devices have their ranges here, each under a lock of its own: a caller holds the lock of
// the device that a range is of, or is to be of. `find` and `device_of` need no lock.
class RangeTable {
 public:
  explicit RangeTable(const driver::Table& table);
  ~RangeTable();
  RangeTable(const RangeTable&) = delete;
  RangeTable& operator=(const RangeTable&) = delete;

  // Most bytes of all ranges together; 0 is unbounded.
  // What is on its way back to the driver counts.
  void set_limit(std::size_t bytes) { limit_ = bytes; }
  void set_managed(bool managed) { managed_ = managed; }
  // Managed ranges made from now on are cut into pieces of so many bytes, a multiple of 2 MiB.
  void set_piece(std::size_t bytes) { piece_ = bytes; }
  // Those for blocks of so many bytes are cut into smaller pieces from now on: there are ops that
  // use a part of such a block.
  void cut_finer(std::size_t block);
  void forget_cuts();  // that there were such ops
  // The sizes of ranges that are, ascending.
  std::vector<std::size_t> cut_sizes() const;
  // Bytes of a piece of the range of such a block; where it is `finer`, as after `cut_finer`.
  std::size_t piece_of(std::size_t block) const;
  std::size_t piece_of(std::size_t block, bool finer) const;
  // `bytes` is rounded up to 2 MiB. kOutOfDeviceMemory beyond the limit; else the driver's reason.
  // `piece`: of this one; 0: that of a block of these bytes.
  Result<RangeId> create(std::size_t bytes, const driver::Place& place, std::size_t piece = 0);
  // Cuts the larger pieces of the range that `id` is of. `act(piece, rest, at)`: what lies in
  // `piece` from its byte `at` on is the new piece `rest`, which may be cut further. False: there
  // are no more ids, and nothing changed.
  template <class Act>
  bool cut(RangeId id, std::size_t piece, Act act) {
    if (!ids_for(at(at(id).head).bytes)) return false;
    for (RangeId now = at(id).head; now != kNoRange; now = at(now).next)
      if (const RangeId rest = split(now, piece); rest != kNoRange) act(now, rest, piece);
    return true;
  }
  // With a freer, the ids and addresses go at once, and the memory is freed by it.
  Status destroy(RangeId id, const driver::Place& place, Freer* freer = nullptr);
  // The driver has the memory of a range again that a freer was given.
  void freed(std::size_t bytes);

  // A subrange: further ids, a head and its pieces, for a part of the range, in whole pages.
  // Addresses lead to the range but where a subrange is shown; shown ones do not overlap.
  RangeId add_subrange(RangeId range, std::size_t offset, std::size_t bytes);
  void remove_subrange(RangeId subrange);  // that is not shown
  void show_subrange(RangeId subrange);
  void hide_subrange(RangeId subrange, RangeId range) {
    UMEM_ASSERT(map_.find(at(subrange).base) == subrange, "only a shown subrange is hidden");
    map_.set(at(subrange).base, at(subrange).bytes, range);
  }
  // No subrange is shown anywhere in its pages.
  bool unseen(RangeId subrange, RangeId range) const;

  // The piece that holds the address.
  RangeId find(const void* ptr) const { return map_.find(reinterpret_cast<std::uintptr_t>(ptr)); }
  // The device that the range is of, or that the id was of last: it may have gone, but for one who
  // uses the range or holds its device's lock.
  int device_of(RangeId id) const { return __atomic_load_n(&at(id).device, __ATOMIC_RELAXED); }
  // Whether its range is one piece.
  bool whole(RangeId id) const { return at(id).pieces == 1; }
  // Calls `act` with the id of each piece of the range that `id` belongs to, in order.
  template <class Act>
  void each_piece(RangeId id, Act act) const {
    if (whole(id)) {  // nearly always
      act(id);
      return;
    }
    for (RangeId piece = at(id).head; piece != kNoRange; piece = at(piece).next) act(piece);
  }
  // The same of those that hold some of these bytes of the range.
  template <class Act>
  void each_piece_in(const void* begin, std::size_t bytes, Act act) const {
    const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(begin) + bytes;
    for (RangeId piece = find(begin); piece != kNoRange && at(piece).base < end;
         piece = at(piece).next)
      act(piece);
  }
  // How many of the range's first `bytes` the piece holds.
  std::size_t piece_bytes(RangeId id, std::size_t bytes) const;
  const Range& operator[](RangeId id) const { return at(id); }
  std::size_t total_bytes() const;
  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  // Ranges stay where they are, in blocks that are made when their first id is taken.
  static constexpr std::uint32_t kBlockBits = 12, kBlock = 1u << kBlockBits, kBlocks = 1u << 14;
  Range& at(RangeId id) const {
    return blocks_[id >> kBlockBits].load(std::memory_order_acquire)[id & (kBlock - 1)];
  }
  void set(RangeId id, const Range& range);
  Status count(std::size_t bytes);
  Result<cu::CUdeviceptr> reserve_aligned(std::size_t bytes, std::uintptr_t& base);
  Status reserve(std::size_t bytes, cu::CUdeviceptr& ptr);
  bool ids_for(std::size_t bytes) const;
  RangeId take_id();
  void give_back_ids(RangeId head);
  RangeId split(RangeId id, std::size_t bytes);
  RangeId name_pieces(std::uintptr_t base, std::size_t bytes, std::size_t piece, int device);

  const driver::Table& table_;
  PageMap map_;
  const std::unique_ptr<std::atomic<Range*>[]> blocks_;
  std::atomic<std::size_t> limit_{0}, piece_{kPieceBytes};
  std::atomic<bool> managed_{true};

  mutable std::mutex mutex_;  // of all below; no call of the driver is made under it
  RangeId next_id_ = 1;
  std::vector<RangeId> free_ids_;
  std::set<std::size_t> cut_sizes_;  // of ranges
  std::size_t total_bytes_ = 0;
};

}  // namespace umem::managed
