#include "runtime/plans.h"

#include <string>
#include <utility>
#include <vector>

#include "runtime/cuts.h"
#include "runtime/device_lock.h"

namespace umem::runtime {
namespace {

using residency::RangeId;

// Requires the device's lock.
Device* device_with(const State& s, const DeviceLock& lock) {
  return s.open() ? lock.device() : nullptr;
}

Result<policy::Planned*> planned_policy(const State& s, const DeviceLock& lock) {
  Device* device = device_with(s, lock);
  if (!device)
    return Status(Code::kBadState,
                  "the plan's device is not open: call umem.enable() first (a GPU is opened by its "
                  "first allocation)");
  if (policy::Planned* planned = device->engine.planned()) return planned;
  return Status(Code::kBadState, std::string("the policy is '") + device->engine.policy().name +
                                     "'; plans are followed by 'planned' only");
}

// The live unit of this address and size. A segment that is not live where a step begins is known
// as well.
RangeId unit_at(const State& s, const Device& device, const policy::Plan& plan, std::size_t t) {
  const std::int64_t address = plan.address[t];
  if (address == 0) return residency::kNoRange;
  const RangeId id = s.ranges.find(reinterpret_cast<const void*>(address));
  if (id == residency::kNoRange || s.ranges.device_of(id) != device.place.device)
    return residency::kNoRange;
  const engine::Engine& engine = device.engine;
  const bool segment = plan.segment[t] != 0;
  const auto kind = static_cast<policy::Kind>(plan.kind[t]);
  const bool later = kind == policy::Kind::kTransient || kind == policy::Kind::kMade;
  const bool there = segment && later ? engine.ledger().has(id) : engine.view().live(id);
  const bool fits = there && engine.ledger().at(id).segment == segment &&
                    s.ranges[id].base == static_cast<std::uintptr_t>(address) &&
                    engine.ledger().at(id).bytes == static_cast<std::size_t>(plan.bytes[t]);
  return fits ? id : residency::kNoRange;
}

// Cuts ranges so that the plan's tensors match their pieces.
void cut_blocks(State& s, Device& device, const policy::Plan& plan) {
  for (const std::int64_t bytes : plan.cut) s.ranges.cut_finer(static_cast<std::size_t>(bytes));
  if (s.ranges.cut_sizes().empty()) return;
  for (const std::int64_t address : plan.address) {
    const RangeId id = s.ranges.find(reinterpret_cast<const void*>(address));
    const bool large = id != residency::kNoRange && s.ranges.device_of(id) == device.place.device &&
                       device.engine.ledger().has(id) && !device.engine.ledger().at(id).segment;
    if (large) cut_as_others(s, device, id);
  }
}

}  // namespace

Result<std::uint64_t> install_plan(policy::Plan plan, int device) {
  UMEM_RETURN_IF_ERROR(policy::check(plan));
  State& s = state();
  if (!State::has_slot(device)) return no_such_device(device);
  const DeviceLock lock(s.slot(device));
  Result<policy::Planned*> planned = planned_policy(s, lock);
  if (!planned.ok()) return planned.take_status();
  cut_blocks(s, *lock.device(), plan);
  std::vector<RangeId> units(plan.bytes.size());
  for (std::size_t t = 0; t < units.size(); ++t) units[t] = unit_at(s, *lock.device(), plan, t);
  const std::uint64_t number = planned.value()->install(std::move(plan), units);
  lock.device()->engine.apply_pending(nullptr);  // its requests at the begin of a step
  return number;
}

std::vector<std::size_t> cut_sizes() {
  return state().ranges.cut_sizes();
}

std::size_t range_bytes(std::size_t block) {
  return managed::range_bytes(block);
}

std::size_t finer_piece(std::size_t block) {
  return state().ranges.piece_of(block, true);
}

Status clear_plans(int device) {
  State& s = state();
  if (!State::has_slot(device)) return no_such_device(device);
  const DeviceLock lock(s.slot(device));
  if (!device_with(s, lock)) return {};
  Result<policy::Planned*> planned = planned_policy(s, lock);
  if (!planned.ok()) return planned.take_status();
  planned.value()->clear();
  lock.device()->engine.apply_pending(nullptr);  // ends its requests
  return {};
}

static Status no_plan(std::uint64_t number) {
  return {Code::kInvalidArgument, "there is no plan " + std::to_string(number) +
                                      " (any more); umem keeps the " +
                                      std::to_string(policy::Planned::kMaxPlans) + " used last"};
}

Status roll_back_plan(std::uint64_t number, int device) {
  State& s = state();
  if (!State::has_slot(device)) return no_such_device(device);
  const DeviceLock lock(s.slot(device));
  Result<policy::Planned*> planned = planned_policy(s, lock);
  if (!planned.ok()) return planned.take_status();
  if (!planned.value()->roll_back(number)) return no_plan(number);
  ++s.plans_rolled_back;
  lock.device()->engine.apply_pending(nullptr);  // ends its requests
  return {};
}

Status replace_plan(std::uint64_t number, policy::Plan plan, int device) {
  UMEM_RETURN_IF_ERROR(policy::check(plan));
  State& s = state();
  if (!State::has_slot(device)) return no_such_device(device);
  const DeviceLock lock(s.slot(device));
  Result<policy::Planned*> planned = planned_policy(s, lock);
  if (!planned.ok()) return planned.take_status();
  const policy::Plan* old = planned.value()->plan(number);
  if (!old) return no_plan(number);
  if (!policy::same_step(*old, plan))
    return {Code::kInvalidArgument, "plan " + std::to_string(number) +
                                        " is for other steps; what replaces it has the same "
                                        "tensors, allocations and ops"};
  planned.value()->replace(number, std::move(plan));
  lock.device()->engine.apply_pending(nullptr);
  return {};
}

Result<policy::PlanStatus> plan_status(int device) {
  State& s = state();
  if (!State::has_slot(device)) return no_such_device(device);
  const DeviceLock lock(s.slot(device));
  if (!device_with(s, lock)) return policy::PlanStatus();
  Result<policy::Planned*> planned = planned_policy(s, lock);
  if (!planned.ok()) return planned.take_status();
  return planned.value()->status();
}

Result<std::size_t> room_ahead(int device) {
  State& s = state();
  if (!State::has_slot(device)) return no_such_device(device);
  const DeviceLock lock(s.slot(device));
  const Device* open = device_with(s, lock);
  return open ? open->engine.room_ahead() : 0;
}

}  // namespace umem::runtime
