// The engine: carries out what the policy says, within the budget. The act between the facts
// (ledger) and the choice (policy).
//
// A wrong decision here costs time only: bytes that are not where an op needs them fault in. The
// one exception is a discard, which is why only units without a live block are ever discarded.
//
// Not thread-safe: the runtime's lock is held around every call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "backing/range_table.h"
#include "base/status.h"
#include "residency/lanes.h"
#include "residency/ledger.h"
#include "residency/policy.h"

namespace umem::residency {

struct Limits {
  std::size_t budget_bytes = 0;
  std::size_t host_budget_bytes = 0;  // 0: unbounded
  std::size_t min_swap_bytes = 0;
};

struct Counters {
  std::uint64_t bytes_in = 0, bytes_out = 0, bytes_discarded = 0;
  std::uint64_t evictions = 0, prefetches = 0, prefetched_unused_bytes = 0;
};

class Engine {
 public:
  // `release_cached` gives the ranges without live blocks back to the driver (and `forget`s them):
  // the way to room where dead bytes cannot be discarded, or host memory of dead ranges is in the
  // way.
  Engine(const driver::Table& table, const backing::RangeTable& ranges, int device, Limits limits,
         std::unique_ptr<Policy> policy, std::function<void()> release_cached);

  Status open() { return lanes_.open(); }
  Status close() { return lanes_.close(); }

  // The range got its first live block. Makes room and populates it on the device; what does not
  // fit is left to faults. kOutOfHostMemory when live bytes would exceed budget + host budget, or
  // the block alone exceeds the budget and the host has no room for it; nothing changed then.
  Status admit(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family);
  // A further block of an admitted range was handed out: brings the range in if it is away.
  void prepare(RangeId id);
  // The range lost its last live block, and no stream works on it: its bytes are dead.
  void retire(RangeId id);
  // The range goes back to the driver.
  void forget(RangeId id);

  // Before an op: pins the units and brings in those that are away.
  void begin_use(const RangeId* ids, std::size_t count);
  // After it: unpins them and marks them as used now.
  void end_use(const RangeId* ids, std::size_t count);

  // Hints. kBadState when an op is using the unit.
  Status prefetch(RangeId id);
  Status evict(RangeId id);

  // Evicts down to the new limits. kOutOfDeviceMemory when what is pinned exceeds them.
  Status set_limits(Limits limits);
  void set_policy(std::unique_ptr<Policy> policy);

  const Limits& limits() const { return limits_; }
  const Policy& policy() const { return *policy_; }
  const Ledger& ledger() const { return ledger_; }
  Ledger& ledger() { return ledger_; }
  const Counters& counters() const { return counters_; }
  // Driver calls that failed in op hooks, where nobody can be told; faults make up for them.
  std::uint64_t hook_errors() const { return hook_errors_; }

 private:
  bool active() const { return policy_->active(); }
  bool away(RangeId id) const;
  bool fits(std::size_t bytes) const {
    return ledger_.resident_bytes() + bytes <= limits_.budget_bytes;
  }
  bool host_has_room(RangeId id);
  bool make_room(std::size_t bytes);
  void discard_dead(std::size_t bytes);
  Status send_out(const std::vector<RangeId>& victims);
  Status fetch(const std::vector<RangeId>& ids);
  void note(const Status& status) { hook_errors_ += status.ok() ? 0 : 1; }
  backing::Span span(RangeId id) const { return {ranges_[id].base, ledger_.at(id).bytes}; }

  const backing::RangeTable& ranges_;
  Lanes lanes_;
  Limits limits_;
  std::unique_ptr<Policy> policy_;
  Ledger ledger_;
  Counters counters_;
  std::function<void()> release_cached_;
  std::uint64_t hook_errors_ = 0;
  cu::CUstream compute_ = nullptr;
  std::vector<RangeId> wanted_, victims_;
  std::vector<backing::Span> spans_;
};

}  // namespace umem::residency
