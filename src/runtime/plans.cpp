#include "runtime/plans.h"

#include <string>
#include <utility>
#include <vector>

#include "runtime/state.h"

namespace umem::runtime {
namespace {

using residency::RangeId;

Device* first_device(const State& s) {
  return s.open() ? s.device(0) : nullptr;
}

// With the lock held.
Result<policy::Planned*> planned_policy(State& s) {
  Device* device = first_device(s);
  if (!device)
    return Status(Code::kBadState,
                  "plans are for the first device, which is not open: call umem.enable() first (a "
                  "GPU is opened by its first allocation)");
  auto* planned = dynamic_cast<policy::Planned*>(&device->engine.policy());
  if (planned) return planned;
  return Status(Code::kBadState, std::string("the policy is '") + device->engine.policy().name() +
                                     "'; plans are followed by 'planned' only");
}

// The live unit of its own that begins at the address and has these bytes.
RangeId unit_at(const State& s, std::int64_t address, std::int64_t bytes) {
  if (address == 0) return residency::kNoRange;
  const RangeId id = s.ranges.find(reinterpret_cast<const void*>(address));
  if (id == residency::kNoRange || s.ranges[id].device != 0) return residency::kNoRange;
  const residency::Engine& engine = s.device(0)->engine;
  const bool fits = engine.view().live(id) && !engine.ledger().at(id).segment &&
                    s.ranges[id].base == static_cast<std::uintptr_t>(address) &&
                    engine.ledger().at(id).bytes == static_cast<std::size_t>(bytes);
  return fits ? id : residency::kNoRange;
}

}  // namespace

Result<std::uint64_t> install_plan(policy::Plan plan) {
  UMEM_RETURN_IF_ERROR(policy::check(plan));
  State& s = state();
  std::lock_guard guard(s.mutex);
  Result<policy::Planned*> planned = planned_policy(s);
  if (!planned.ok()) return planned.take_status();
  std::vector<RangeId> units(plan.bytes.size());
  for (std::size_t t = 0; t < units.size(); ++t)
    units[t] = unit_at(s, plan.address[t], plan.bytes[t]);
  const std::uint64_t number = planned.value()->install(std::move(plan), units);
  s.device(0)->engine.apply_pending(nullptr);  // its requests where a step begins
  return number;
}

Status clear_plans() {
  State& s = state();
  std::lock_guard guard(s.mutex);
  if (!first_device(s)) return {};
  Result<policy::Planned*> planned = planned_policy(s);
  if (!planned.ok()) return planned.take_status();
  planned.value()->clear();
  s.device(0)->engine.apply_pending(nullptr);  // the end of what it requested
  return {};
}

Status roll_back_plan(std::uint64_t number) {
  State& s = state();
  std::lock_guard guard(s.mutex);
  Result<policy::Planned*> planned = planned_policy(s);
  if (!planned.ok()) return planned.take_status();
  if (!planned.value()->roll_back(number))
    return {Code::kInvalidArgument, "there is no plan " + std::to_string(number) +
                                        " (any more); umem keeps the " +
                                        std::to_string(policy::Planned::kMaxPlans) + " used last"};
  ++s.counts.plans_rolled_back;
  s.device(0)->engine.apply_pending(nullptr);  // the end of what it requested
  return {};
}

Result<policy::PlanStatus> plan_status() {
  State& s = state();
  std::lock_guard guard(s.mutex);
  if (!first_device(s)) return policy::PlanStatus();
  Result<policy::Planned*> planned = planned_policy(s);
  if (!planned.ok()) return planned.take_status();
  return planned.value()->status();
}

}  // namespace umem::runtime
