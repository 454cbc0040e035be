// State shared by the parts of the engine: the residency table, the limits, the policy and the
// counters.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "driver/place.h"
#include "managed/attached_pages.h"
#include "managed/memory_ops.h"
#include "managed/range_table.h"
#include "policy/planned.h"
#include "policy/registry.h"
#include "residency/ledger.h"
#include "residency/view.h"

namespace umem::engine {

using residency::CandidateView;
using residency::Family;
using residency::kNoRange;
using residency::Ledger;
using residency::OpUse;
using residency::RangeId;
using residency::State;
using residency::Tag;
using residency::Unit;

struct Limits {
  std::size_t budget_bytes = 0;
  std::size_t host_budget_bytes = 0;  // 0: unbounded
  std::size_t min_swap_bytes = 0;
  std::size_t outside_bytes = 0;  // part of the budget that is used outside of umem
  std::size_t reserve_bytes = 0;  // part of the budget that pins never take: the ops' working sets
};

struct Counters {
  std::uint64_t bytes_in = 0, bytes_out = 0, bytes_discarded = 0;
  std::uint64_t evictions = 0, prefetches = 0, prefetched_unused_bytes = 0;
  std::uint64_t capture_skips = 0;
  std::uint64_t plan_hits = 0, plan_misses = 0;
  std::uint64_t advice_ignored = 0;
  std::uint64_t left_out = 0;         // units in use that did not fit
  std::uint64_t zero_copy_bytes = 0;  // the part that ops used on the host
};

struct EngineState {
  const driver::Table& table;
  const managed::RangeTable& ranges;
  const driver::Place place;
  const bool managed;
  Limits limits;
  const policy::Policy* policy = nullptr;
  std::unique_ptr<policy::Planned> planned;  // null unless the policy follows plans
  Ledger ledger;
  Counters counters;
  std::uint64_t errors = 0;         // failures in op hooks, which cannot return errors
  managed::AttachedPages attached;  // of a real driver only
  std::size_t total_bytes = 0;  // the device's memory, and the part that others had at the start
  std::size_t others_bytes = 0;
  std::size_t recycled_bytes = 0;  // part of `attached` that was given to other addresses
  std::size_t joined_idle = 0;     // dead bytes that cannot be dropped alone (sharing.h)

  bool active() const { return managed && policy->victims; }
  // Without evictions, page faults move pages of dead blocks out of the way, but no mappings.
  bool drops_uncounted() const { return active() || mapped(); }
  bool follows_plans() const { return planned && planned->has_plans(); }
  void set_policy(const policy::Policy& chosen) {
    policy = &chosen;
    planned = chosen.follows_plans ? std::make_unique<policy::Planned>() : nullptr;
  }
  // Appends units to evict, first to go first, until they hold `need` bytes or none is left.
  void victims(std::size_t need, std::vector<RangeId>& out) const {
    if (planned)
      planned->victims(view(), need, out);
    else if (policy->victims)
      policy->victims(view(), need, out);
  }
  // Null: the driver moves the memory, and brings what is used by page faults.
  managed::MappedMemory* mapped() const { return ranges.mapped(); }
  // True if prefetches to the host take time and a thread of their own; they are started early.
  bool asynchronous() const { return place.context != nullptr; }
  // Nothing brings mapped memory back while the policy moves nothing.
  Status check_moves() const {
    if (!mapped() || active()) return {};
    return {Code::kNotSupported,
            "with backing=mapped and the policy none nothing leaves the device; choose another "
            "policy, or backing=managed"};
  }
  std::size_t taken() const { return ledger.resident_bytes() + limits.outside_bytes; }
  // The part that is left when all dead bytes are dropped.
  std::size_t kept() const { return taken() - (ledger.dead_bytes() - joined_idle); }
  // The part of the budget that is not used outside of umem.
  std::size_t share() const {
    return limits.budget_bytes - std::min(limits.outside_bytes, limits.budget_bytes);
  }
  bool fits(std::size_t bytes) const { return taken() + bytes <= limits.budget_bytes; }
  CandidateView view() const {
    return {ledger, limits.min_swap_bytes,
            limits.budget_bytes - std::min(kept(), limits.budget_bytes), mapped() != nullptr};
  }
  managed::MemSpan span(RangeId id) const { return {ranges[id].base, ledger.at(id).bytes}; }
  // While the stream captures a graph, its work does not run now, and umem's calls would become
  // part of the graph. Page faults of the replay bring in what is away then.
  bool skip_for_capture(cu::CUstream stream) {
    if (!driver::capturing(table, place, stream)) return false;
    ++counters.capture_skips;
    return true;
  }
  // The driver holds device memory for the unit from now on.
  void attach(RangeId id) {
    if (asynchronous() && !mapped()) attached.attach(span(id));
  }
  // Device memory that the driver holds for umem's addresses, with or without contents.
  std::size_t attached_bytes() const {
    const std::size_t resident = ledger.resident_bytes();
    if (mapped()) return resident;  // what leaves is given back
    if (!asynchronous() || !managed) return resident + ledger.dropped_bytes();
    const std::size_t held = attached.bytes() - std::min(attached.bytes(), recycled_bytes);
    return std::max(resident, std::min(held, total_bytes));
  }
  // The free memory bounds the memory that the driver holds for umem: attached memory beyond the
  // bound was taken for others.
  void observe_memory(std::size_t free_bytes) {
    const std::size_t used = total_bytes - std::min(total_bytes, free_bytes);
    const std::size_t most = used - std::min(used, others_bytes);
    const std::size_t unused =
        attached.bytes() - std::min(attached.bytes(), ledger.resident_bytes());
    if (attached.bytes() > most) recycled_bytes = std::max(recycled_bytes, attached.bytes() - most);
    recycled_bytes = std::min(recycled_bytes, unused);
  }
  void count_error(const Status& status) { errors += status.ok() ? 0 : 1; }
};

}  // namespace umem::engine
