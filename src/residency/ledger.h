// The ledger is the residency table: facts about every residency unit (a large block, or a 2 MiB
// segment of small ones), with the resident ones in recency order. It decides nothing and moves
// nothing.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/assert.h"
#include "base/units.h"
#include "managed/range_table.h"
#include "residency/tags.h"

namespace umem::residency {

using managed::kNoRange;
using managed::RangeId;

enum class State : unsigned char {
  kNone,    // no such unit
  kVoid,    // live, and not known to be on the device or to hold data on the host
  kDevice,  // live, on the device
  kHost,    // live, on the host
  kDead,    // not live, frames still held
  kGone,    // not live, no frames held
};
const char* name(State state);

// A rule of the program: policies leave blocks of these requested sizes in place. It covers a
// segment of small blocks if it may cover some block in it.
struct Exemption {
  std::uint64_t number = 0;
  Tag tag = Tag::kCount;  // kCount: any
  std::size_t min_bytes = 0, max_bytes = 0;
};

inline constexpr std::uint64_t kNoIdle = std::uint64_t{1} << 62;  // no block came yet

struct Unit {
  std::size_t bytes = 0;            // device bytes when resident: whole pages
  std::size_t requested_bytes = 0;  // requested size of its large block, all pieces together
  std::size_t host_bytes = 0;  // host memory that the driver holds for it until the range is freed
  std::uint64_t last_use = 0;
  std::uint64_t death = 0;       // when the last block in it was freed; 0: there was none
  std::uint64_t idle = kNoIdle;  // from the death before that to the next block
  std::uint64_t born = 0;        // orders blocks by allocation; for a segment, its first block
  std::uint64_t first_use = 0;   // since it came to the device; 0: not yet
  RangeId older = kNoRange, newer = kNoRange;  // neighbours in the list of its state
  std::uint32_t op_pins = 0;                   // pins by running ops
  std::uint32_t user_pins = 0;                 // pins by the program: it stays on the device
  std::uint32_t exempt = 0;  // exemptions by the program: policies leave it in place
  State state = State::kNone;
  Tag tag = Tag::kTemp;
  Family family = Family::kNone;
  bool segment = false;            // holds small blocks
  bool prefetched_unused = false;  // fetched, and no op has used it since
  bool dropped = false;            // discarded: the driver takes the frames when it needs them
  bool discarded = false;          // live, but without contents until something is written
  bool read_mostly = false;        // advised: the driver keeps a copy on the host until a write
  bool by_policy = false;          // advised by the policy
  bool used_away = false;          // used since it left the device, where it was then
  bool fresh = false;              // allocated, and no op that used it has ended
  bool clean = false;              // the host's copy is valid as far as umem knows
  bool in_file = false;            // a file of the program had its contents when they were placed
  bool joined = false;             // mapped as one with others, so that it cannot leave alone
  // A collective may be using it, on its own stream or thread, until a later op uses it (mapped
  // memory: until the step ends).
  bool in_collective = false;
  std::uint32_t used_on = 0;      // streams of ops that used it, as bits of Streams
  cu::CUstream stream = nullptr;  // the stream that its blocks are allocated on
  std::uint64_t arrival = 0;      // the inbound lane's ticket; 0: nothing is under way
  std::uint64_t departure = 0;    // the outbound lane's ticket
  std::uint64_t populated = 0;    // the local lane's ticket; of mapped memory its last discard's

  // An op that is not over may have allocated it for itself, or a block in it.
  bool may_be_used_unseen() const { return segment || fresh; }
};

class Ledger {
 public:
  const Unit& at(RangeId id) const {
    UMEM_ASSERT(id < units_.size(), "the id is one that the table has seen");
    return units_[id];
  }
  bool has(RangeId id) const {
    return id != kNoRange && id < units_.size() && units_[id].state != State::kNone;
  }
  // Live, and not known to be on the device.
  bool away(RangeId id) const {
    const State state = at(id).state;
    return state == State::kHost || state == State::kVoid;
  }
  bool live(RangeId id) const {
    return has(id) && (away(id) || units_[id].state == State::kDevice);
  }
  std::size_t capacity() const { return units_.size(); }
  // The program wants it left in place.
  bool kept_in_place(RangeId id) const {
    const Unit& unit = units_[id];
    return unit.user_pins > 0 || unit.exempt > 0 || (!exemptions_.empty() && exempted(unit));
  }
  bool exempted(const Unit& unit) const;

  // Adds a live unit in state kVoid. A cached unit of the same range keeps its pins and host
  // memory.
  void add(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family);
  // A new block reuses the range while its frames are in place: kDead -> kDevice.
  void revive(RangeId id, Tag tag, Family family);
  // Splits the unit: its bytes from `at` on become another unit with the same properties. No op
  // uses it.
  void split(RangeId id, RangeId rest, std::size_t at);
  void drop(RangeId id);  // kDead -> kGone, by a discard
  // The driver has taken the dropped unit's frames.
  void forget_dropped(RangeId id) {
    if (units_[id].dropped) dropped_ -= units_[id].bytes;
    units_[id].dropped = false;
  }
  void remove(RangeId id);
  void set_fresh(RangeId id) { units_[id].fresh = true; }
  void set_used_away(RangeId id) { units_[id].used_away = true; }
  void set_state(RangeId id, State state);
  void set_tag(RangeId id, Tag tag, Family family);
  // `inner`: by an op within another one.
  void touch(RangeId id, bool inner = false);  // marks the unit as used now, and newest in its list
  std::uint64_t now() const { return clock_; }
  void pin(RangeId id) {
    UMEM_ASSERT(has(id), "only a unit is pinned");
    Unit& unit = units_[id];
    if (unit.op_pins++ == 0) op_pinned_ += unit.bytes;
  }
  void unpin(RangeId id) {
    Unit& unit = units_[id];
    if (unit.op_pins == 0 || --unit.op_pins > 0) return;
    UMEM_ASSERT(op_pinned_ >= unit.bytes, "the bytes of a pinned unit are counted");
    op_pinned_ -= unit.bytes;
  }
  // Replaces all pins by ops. A block of a layout that was freed is no unit, and keeps its pins.
  void set_op_pins(const std::vector<RangeId>& pins) {
    for (Unit& unit : units_) unit.op_pins = 0;
    op_pinned_ = 0;
    for (RangeId id : pins)
      if (id < units_.size() && units_[id].op_pins++ == 0) op_pinned_ += units_[id].bytes;
  }
  // Marks the unit as `in_collective`. If all marked units on the device together exceed `most`
  // bytes, the mark of the oldest ends.
  void begin_collective(RangeId id, std::size_t most);
  void end_collective(RangeId id) { units_[id].in_collective = false; }
  // Ends all marks; true if there was one.
  bool end_collectives();
  bool any_collective() const { return !collectives_.empty(); }
  // Shared pages between two lives count as dead or dropped units, and hold host memory.
  void add_idle_dead(std::size_t bytes) {
    resident_ += bytes;
    dead_ += bytes;
  }
  void drop_idle(std::size_t bytes) {
    UMEM_ASSERT(bytes <= dead_ && dead_ <= resident_, "what is dropped was dead");
    resident_ -= bytes;
    dead_ -= bytes;
    dropped_ += bytes;
  }
  void send_idle(std::size_t bytes, std::size_t new_on_host) {
    UMEM_ASSERT(bytes <= dropped_, "what is sent was dropped");
    dropped_ -= bytes;
    host_ += new_on_host;
    peak_host_ = peak_host_ < host_ ? host_ : peak_host_;
  }
  void forget_idle(std::size_t dead, std::size_t dropped, std::size_t host) {
    UMEM_ASSERT(dead <= dead_ && dropped <= dropped_ && host <= host_, "idle pages are counted");
    resident_ -= dead;
    dead_ -= dead;
    dropped_ -= dropped;
    host_ -= host;
  }
  // Host memory that is counted although it belongs to no unit.
  void give_host(RangeId id) { units_[id].host_bytes = 0; }
  void take_host(RangeId id, std::size_t bytes) { units_[id].host_bytes = bytes; }
  void user_pin(RangeId id) {
    Unit& unit = units_[id];
    if (unit.user_pins++ == 0) user_pinned_ += unit.bytes;
  }
  void user_unpin(RangeId id) {
    Unit& unit = units_[id];
    if (unit.user_pins == 0 || --unit.user_pins > 0) return;
    UMEM_ASSERT(user_pinned_ >= unit.bytes, "the bytes of a pinned unit are counted");
    user_pinned_ -= unit.bytes;
  }
  void exempt(RangeId id) { ++units_[id].exempt; }
  void unexempt(RangeId id) { units_[id].exempt -= units_[id].exempt > 0 ? 1 : 0; }
  void add_exemption(const Exemption& rule) { exemptions_.push_back(rule); }
  void remove_exemption(std::uint64_t number);
  void set_requested_bytes(RangeId id, std::size_t bytes) { units_[id].requested_bytes = bytes; }
  void set_discarded(RangeId id) { units_[id].discarded = true; }
  void set_prefetched(RangeId id) { units_[id].prefetched_unused = true; }
  void set_read_mostly(RangeId id, bool on, bool by_policy) {
    units_[id].read_mostly = on;
    units_[id].by_policy = on && by_policy;
    units_[id].clean = false;
  }
  // The driver holds host memory for the unit from now on.
  void hold_host(RangeId id);
  // Records the time of death: work that is enqueued later does not use the block's bytes.
  void set_death(RangeId id) { units_[id].death = ++clock_; }
  // The dead unit, of those that died first, whose bytes most likely serve again last: steps
  // repeat, so that a unit stays dead as long as it did the last time. Belady, IBM Systems Journal
  // 5(2), 1966, with a prediction for the future. One that is overdue, for example since a phase
  // with other shapes began, is expected to stay dead for as long as it is overdue. kNoRange: there
  // is none.
  RangeId last_to_revive() const;
  void set_in_file(RangeId id, bool on) { units_[id].in_file = on; }
  void set_clean(RangeId id) { units_[id].clean = true; }
  void set_joined(RangeId id, bool on) { units_[id].joined = on; }
  void set_stream(RangeId id, cu::CUstream stream) { units_[id].stream = stream; }
  void use_on(RangeId id, std::uint32_t stream_bit) { units_[id].used_on |= stream_bit; }
  void set_arrival(RangeId id, std::uint64_t ticket) { units_[id].arrival = ticket; }
  void set_populated(RangeId id, std::uint64_t ticket) { units_[id].populated = ticket; }
  void set_departure(RangeId id, std::uint64_t ticket) {
    units_[id].departure = ticket;
    units_[id].used_on = 0;
  }

  // Heads of the recency lists; iterate with at(id).newer.
  RangeId oldest_resident() const { return resident_list_.oldest; }

  std::size_t resident_bytes() const { return resident_; }  // kDevice and kDead
  RangeId oldest_dead() const { return dead_list_.oldest; }
  std::size_t dead_bytes() const { return dead_; }
  // Not resident for umem; on the device until the driver needs the memory.
  std::size_t dropped_bytes() const { return dropped_; }
  std::size_t host_bytes() const { return host_; }  // sum of Unit::host_bytes
  std::size_t op_pinned_bytes() const { return op_pinned_; }
  std::size_t user_pinned_bytes() const { return user_pinned_; }
  // Maximum since the last reset.
  std::size_t peak_resident_bytes() const { return peak_resident_; }
  std::size_t peak_host_bytes() const { return peak_host_; }
  void reset_peaks() {
    peak_resident_ = resident_;
    peak_host_ = host_;
  }
  std::size_t live_bytes() const { return live_; }

  // Bytes that belong to no unit: shared pages between two lives.
  struct Idle {
    std::size_t dead = 0, dropped = 0, host = 0;  // bytes
  };
  // Asserts that the sums and the lists agree with the units. A full scan.
  void check_invariants(const Idle& idle) const;

 private:
  void note_idle(Unit& unit);  // a block is about to be in it
  struct List {
    RangeId oldest = kNoRange, newest = kNoRange;
  };
  List* list_of(State state);
  static bool may_become(State from, State to);
  void link(List& list, RangeId id);
  void unlink(List& list, RangeId id);
  void account(const Unit& unit, bool entering);

  std::vector<Unit> units_;
  std::vector<Exemption> exemptions_;
  std::vector<RangeId> collectives_;  // units that are, or were, in a collective
  List resident_list_, dead_list_;
  std::size_t resident_ = 0, dead_ = 0, dropped_ = 0, host_ = 0, op_pinned_ = 0, user_pinned_ = 0,
              live_ = 0;
  std::size_t peak_resident_ = 0, peak_host_ = 0;
  std::uint64_t clock_ = 0, births_ = 0;
};

}  // namespace umem::residency
