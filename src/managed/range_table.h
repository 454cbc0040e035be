// Managed ranges: whole 2 MiB pages of address space from cuMemAllocManaged, each with a small id,
// and the map from addresses to ranges. If managed memory cannot be used, plain device memory.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
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
#include "managed/mapped_memory.h"
#include "managed/page_map.h"

namespace umem::managed {

using RangeId = std::uint32_t;
inline constexpr RangeId kNoRange = 0;  // ids start at 1

// Why a range beyond the limit is refused.
inline constexpr char kGuardRefusal[] =
    "UMEM_GUARD keeps managed memory within what each device had free at its first use";

// Address space of a large block of managed memory: whole pages up to 32 MiB, then multiples of an
// eighth of a power of two, so that ranges fit later requests of similar sizes. Pages beyond the
// request are never touched and take no memory.
std::size_t range_bytes(std::size_t block);

// A range is one allocation of the driver. A range larger than a piece has several ids, its own and
// one per further piece, so that its bytes can be in several places.
struct Range {
  std::uintptr_t base = 0;  // 2 MiB-aligned; for a further piece, its begin
  std::size_t bytes = 0;    // a multiple of 2 MiB; for a further piece, its size
  std::uintptr_t raw = 0;   // the driver's address (differs if it was not aligned)
  int device = 0;
  RangeId head = kNoRange;   // the range that this belongs to, or itself
  RangeId next = kNoRange;   // the next piece of that range
  std::uint32_t pieces = 0;  // number of pieces, at the head; 0 for further pieces
};

// Ranges of several devices, each under its device's lock: a caller holds the lock of the range's
// device. `find` and `device_of` need no lock.
class RangeTable {
 public:
  explicit RangeTable(const driver::Table& table);
  ~RangeTable();
  RangeTable(const RangeTable&) = delete;
  RangeTable& operator=(const RangeTable&) = delete;

  // Upper bound of the bytes of a device's ranges; 0: unbounded. Ranges that are being freed count.
  void set_limit(std::size_t bytes, int device);
  void set_managed(bool managed) { managed_ = managed; }
  // Ranges made from now on are mapped memory; false: the driver's. No range may exist.
  void set_mapped(bool mapped) { uses_mapped_ = mapped; }
  // The bytes of a new range for such a block: all of a range of plain memory is taken.
  std::size_t bytes_for(std::size_t block) const {
    return managed_ || uses_mapped_ ? range_bytes(block) : align_up(block, kPageBytes);
  }
  // Null: ranges are not mapped memory.
  MappedMemory* mapped() const { return uses_mapped_ ? &mapped_ : nullptr; }
  // Gives a range's memory back to the driver: `raw` is the driver's address. Waits for the device.
  Status release(std::uintptr_t raw) const;
  // The size of pieces of ranges made from now on, a multiple of 2 MiB.
  void set_piece(std::size_t bytes) { piece_ = bytes; }
  // From now on ranges for blocks of this size are cut into smaller pieces, because ops use parts
  // of such blocks.
  void cut_finer(std::size_t block);
  void forget_cuts();  // forgets those sizes
  // The sizes of ranges that are cut finer, ascending.
  std::vector<std::size_t> cut_sizes() const;
  // The bytes of a piece of such a block's range; `finer`: as after `cut_finer`.
  std::size_t piece_of(std::size_t block) const;
  std::size_t piece_of(std::size_t block, bool finer) const;
  // `bytes` is rounded up to 2 MiB. kOutOfDeviceMemory beyond the limit; otherwise the driver's
  // error. `piece`: the size of its pieces; 0: the usual size for such blocks.
  Result<RangeId> create(std::size_t bytes, const driver::Place& place, std::size_t piece = 0);
  // Cuts the larger pieces of the range that `id` belongs to. `act(piece, rest, at)`: bytes of
  // `piece` from `at` on are the new piece `rest`, which may be cut further. False: out of ids, and
  // nothing changed.
  template <class Act>
  bool cut(RangeId id, std::size_t piece, Act act) {
    if (!ids_for(at(at(id).head).bytes)) return false;
    for (RangeId now = at(id).head; now != kNoRange; now = at(now).next)
      if (const RangeId rest = split(now, piece); rest != kNoRange) act(now, rest, piece);
    return true;
  }
  // With a freer, ids and addresses are removed at once, and the freer frees the memory.
  Status destroy(RangeId id, const driver::Place& place, Freer* freer = nullptr);
  // A freer has freed the memory of a range.
  void freed(std::size_t bytes, int device);

  // A subrange: additional ids, a head and its pieces, for some whole pages of the range. Addresses
  // map to the range unless a subrange is shown; shown subranges do not overlap.
  RangeId add_subrange(RangeId range, std::size_t offset, std::size_t bytes);
  void remove_subrange(RangeId subrange);  // must not be shown
  void show_subrange(RangeId subrange);
  void hide_subrange(RangeId subrange, RangeId range) {
    UMEM_ASSERT(map_.find(at(subrange).base) == subrange, "only a shown subrange is hidden");
    map_.set(at(subrange).base, at(subrange).bytes, range);
  }
  // Shows no subrange in its pages.
  bool unseen(RangeId subrange, RangeId range) const;

  // The piece that contains the address.
  RangeId find(const void* ptr) const { return map_.find(reinterpret_cast<std::uintptr_t>(ptr)); }
  // The device of the range, or the last device of the id: the range may be gone unless the caller
  // uses it or holds its device's lock.
  int device_of(RangeId id) const { return __atomic_load_n(&at(id).device, __ATOMIC_RELAXED); }
  // True if its range is one piece.
  bool whole(RangeId id) const { return at(id).pieces == 1; }
  // Calls `act` with the id of each piece of the range that `id` belongs to, in order.
  template <class Act>
  void each_piece(RangeId id, Act act) const {
    if (whole(id)) {  // the common case
      act(id);
      return;
    }
    for (RangeId piece = at(id).head; piece != kNoRange; piece = at(piece).next) act(piece);
  }
  // Likewise for pieces that contain some of these bytes.
  template <class Act>
  void each_piece_in(const void* begin, std::size_t bytes, Act act) const {
    const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(begin) + bytes;
    for (RangeId piece = find(begin); piece != kNoRange && at(piece).base < end;
         piece = at(piece).next)
      act(piece);
  }
  // The number of the range's first `bytes` in the piece.
  std::size_t piece_bytes(RangeId id, std::size_t bytes) const;
  const Range& operator[](RangeId id) const { return at(id); }
  std::size_t total_bytes() const;
  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  // Ranges have stable addresses, in blocks that are allocated for their first id.
  static constexpr std::uint32_t kBlockBits = 12, kBlock = 1u << kBlockBits, kBlocks = 1u << 14;
  Range& at(RangeId id) const {
    return blocks_[id >> kBlockBits].load(std::memory_order_acquire)[id & (kBlock - 1)];
  }
  void set(RangeId id, const Range& range);
  Status count(std::size_t bytes, int device);
  Result<cu::CUdeviceptr> reserve_aligned(std::size_t bytes, int device, std::uintptr_t& base);
  Status reserve(std::size_t bytes, int device, cu::CUdeviceptr& ptr);
  bool ids_for(std::size_t bytes) const;
  RangeId take_id();
  void give_back_ids(RangeId head);
  RangeId split(RangeId id, std::size_t bytes);
  RangeId name_pieces(std::uintptr_t base, std::size_t bytes, std::size_t piece, int device);

  const driver::Table& table_;
  PageMap map_;
  const std::unique_ptr<std::atomic<Range*>[]> blocks_;
  std::atomic<std::size_t> piece_{kPieceBytes};
  std::atomic<bool> managed_{true}, uses_mapped_{false};
  mutable MappedMemory mapped_{table_};

  mutable std::mutex mutex_;  // guards the members below; no driver call is made under it
  RangeId next_id_ = 1;
  std::vector<RangeId> free_ids_;
  std::set<std::size_t> cut_sizes_;  // of ranges
  struct Total {
    std::size_t bytes = 0, limit = 0;  // limit 0: none
  };
  std::map<int, Total> totals_;  // by device
};

}  // namespace umem::managed
