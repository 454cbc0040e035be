#include "runtime/devices.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "base/format.h"
#include "driver/capabilities.h"
#include "driver/loader.h"
#include "driver/memory_info.h"
#include "policy/registry.h"
#include "runtime/cache.h"
#include "soft/device.h"

namespace umem::runtime {
namespace {

using driver::check;
using driver::Entry;

Status open_soft(State& s, const Options& options) {
  const soft::Profile* profile = soft::find_profile(options.profile);
  if (!profile) return {Code::kInvalidArgument, "unknown device profile '" + options.profile + "'"};
  for (double given :
       {options.link_in_bytes_per_us, options.link_out_bytes_per_us, options.fault_us})
    if (!(given >= 0) || std::isinf(given))
      return {Code::kInvalidArgument,
              "link rates and the cost of a fault are finite and not negative; 0: the profile's"};
  soft::Profile used = *profile;
  if (options.link_in_bytes_per_us > 0) used.bytes_per_us_in = options.link_in_bytes_per_us;
  if (options.link_out_bytes_per_us > 0) used.bytes_per_us_out = options.link_out_bytes_per_us;
  if (options.fault_us > 0) used.fault_us = options.fault_us;
  const std::size_t bytes = options.device_bytes ? options.device_bytes : options.budget_bytes;
  soft::Options soft{bytes, &used, options.backed};
  soft.disk = options.disk;
  soft.disk_bytes = options.disk_bytes;
  soft.staging_bytes = options.staging_bytes;
  return soft::open(soft, s.driver);
}

// Finds out if managed memory is used. If not, the reason is printed once: without it, memory
// cannot exceed the device.
Status look_at_driver(State& s) {
  if (s.managed.has_value()) return {};
  s.managed = true;
  if (s.driver.kind == driver::Kind::kSoft) return {};
  driver::Capabilities found;
  Status status = driver::read_capabilities(s.driver, found);
  if (!status.ok()) {
    s.managed.reset();
    return status;
  }
  s.integrated = 0;
  int ordinal = 0;
  for (const driver::DeviceCapabilities& device : found.devices) {
    if (device.integrated && State::has_slot(ordinal)) s.integrated |= mask_of(ordinal);
    ++ordinal;
  }
  if (s.options.backing == "mapped" && !found.integrated) return {};  // needs no managed memory
  const std::string problem = driver::managed_memory_problem(found);
  if (problem.empty()) return {};
  s.managed = false;
  std::fprintf(stderr, "umem: warning: %s; plain device memory is used, and nothing is evicted\n",
               problem.c_str());
  return {};
}

Status limit_ranges(State& s, const driver::Place& place) {
  s.ranges.set_limit(0, place.device);
  if (!s.options.guard || s.mapped()) return {};  // it bounds managed memory
  Result<driver::MemoryInfo> memory = driver::memory_info(s.driver.table, place);
  if (!memory.ok()) return memory.take_status();
  s.ranges.set_limit(memory.value().free_bytes, place.device);
  return {};
}

// Records how much memory other users of the device hold before umem allocates.
Status note_memory(const State& s, Device& device) {
  if (s.driver.kind == driver::Kind::kSoft) return {};
  Result<driver::MemoryInfo> memory = driver::memory_info(s.driver.table, device.place);
  if (!memory.ok()) return memory.take_status();
  device.engine.set_memory(memory.value().free_bytes, s.usable_bytes(memory.value().total_bytes));
  return {};
}

Result<driver::Place> find_place(State& s, int ordinal) {
  driver::Place place{ordinal, nullptr, &s.captures};
  place.timed = s.driver.kind != driver::Kind::kSoft || s.options.timed;
  if (s.driver.kind == driver::Kind::kSoft) return place;
  place.integrated = (s.integrated & mask_of(ordinal)) != 0;
  const driver::Table& table = s.driver.table;
  cu::CUdevice handle = 0;
  UMEM_RETURN_IF_ERROR(check(table.cuDeviceGet(&handle, ordinal), Entry::cuDeviceGet));
  UMEM_RETURN_IF_ERROR(check(table.cuDevicePrimaryCtxRetain(&place.context, handle),
                             Entry::cuDevicePrimaryCtxRetain));
  return place;
}

Status release_place(State& s, const driver::Place& place) {
  if (place.context == nullptr) return {};
  return check(s.driver.table.cuDevicePrimaryCtxRelease(place.device),
               Entry::cuDevicePrimaryCtxRelease);
}

// Ends the device's threads.
Status close_device(Device& device) {
  device.engine.finish_retired();
  UMEM_RETURN_IF_ERROR(trim_cache(device, 0));
  if (*device.place.captures > 0)  // then nothing was trimmed
    return {Code::kBadState, "a graph is being captured; end the capture first"};
  UMEM_RETURN_IF_ERROR(device.freer.drain());
  UMEM_RETURN_IF_ERROR(device.engine.close());
  device.freer.close();
  return {};
}

// Called by the engine where dead bytes take the room that it needs.
void release_cached(Device& device) {
  const Status trimmed = trim_cache(device, 0);
  (void)trimmed;  // memory that the driver refuses to take back stays cached
  // The engine counts on the room from now on. Host memory of dead managed ranges is free a little
  // later: an operator must not wait for the device.
  if (!device.frees_on_thread() || (device.engine.managed() && !device.engine.mapped())) return;
  const Status freed = device.freer.wait();
  (void)freed;  // freed by a later attempt
}

}  // namespace

Status check_limits(const Options& options) {
  if (options.budget_bytes >= options.floor_bytes) return {};
  return {Code::kInvalidArgument, "budget " + format_bytes(options.budget_bytes) +
                                      " is below the floor of " +
                                      format_bytes(options.floor_bytes)};
}

Status resolve_budget(const State& s, const driver::Place& place, std::size_t held_bytes,
                      Options& options) {
  if (options.budget_bytes > 0) return {};
  Result<driver::MemoryInfo> memory = driver::memory_info(s.driver.table, place);
  if (!memory.ok()) return memory.take_status();
  auto [free_bytes, total_bytes] = memory.value();
  total_bytes = s.usable_bytes(total_bytes);
  if (options.budget_percent > 0) {
    options.budget_bytes =
        static_cast<std::size_t>(static_cast<double>(total_bytes) * options.budget_percent / 100);
  } else {
    free_bytes += held_bytes;
    options.budget_bytes =
        std::min(free_bytes - headroom_bytes(free_bytes), s.allowed_bytes(total_bytes));
  }
  options.budget_bytes = align_down(options.budget_bytes, kPageBytes);
  return check_limits(options);
}

// A device keeps the budget that it found if the options set none.
engine::Limits limits_of(State& s, const Options& options, int ordinal) {
  const Requested& requested = s.requested[static_cast<std::size_t>(ordinal)];
  std::size_t budget = requested.budget_bytes > 0 ? requested.budget_bytes : options.budget_bytes;
  if (const auto& device = s.slot(ordinal).device; device && budget == 0)
    budget = device->engine.limits().budget_bytes;
  return {budget, options.host_budget_bytes, options.min_swap_bytes, requested.outside_bytes,
          options.floor_bytes};
}

// The software device exists from now on. A GPU is first touched by the first allocation, so that
// the process may fork until then.
Status open_driver(State& s, const Options& options) {
  if (options.device == "soft") return open_soft(s, options);
  if (options.device == "cuda") return driver::open_cuda(s.driver);
  return {Code::kInvalidArgument, "unknown device '" + options.device + "'; allowed: cuda, soft"};
}

static Result<std::unique_ptr<Device>> make_device(State& s, const driver::Place& place) {
  const int ordinal = place.device;
  Options options = s.options;
  std::unique_ptr<Ballast> ballast;
  if (options.device_bytes > 0 && s.driver.kind == driver::Kind::kCuda) {
    ballast = std::make_unique<Ballast>(s.driver.table, place);
    UMEM_RETURN_IF_ERROR(ballast->leave(options.device_bytes));
  }
  const std::size_t outside = s.requested[static_cast<std::size_t>(ordinal)].outside_bytes;
  UMEM_RETURN_IF_ERROR(resolve_budget(s, place, outside, options));
  UMEM_RETURN_IF_ERROR(limit_ranges(s, place));
  auto made = std::make_unique<Device>(s.driver, s.ranges, place, *s.managed,
                                       *policy::find(options.policy), &release_cached);
  made->ballast = std::move(ballast);
  // A replay has figures instead, also of budgets that it only tries.
  made->warned_above_budget = made->warned_thrashing = options.timed;
  UMEM_RETURN_IF_ERROR(note_memory(s, *made));
  Status opened = made->engine.open(limits_of(s, options, ordinal));
  if (opened.ok() && made->frees_on_thread()) opened = made->freer.open();
  if (!opened.ok()) {
    const Status closed = made->engine.close();
    (void)closed;  // the first error is the one to report
    return opened;
  }
  if (s.logs_transfers) {
    if (const Status logged = made->engine.start_log(); !logged.ok())
      std::fprintf(stderr, "umem: warning: %s; a profile has no rows of device %d\n",
                   logged.message().c_str(), ordinal);
  }
  made->arena.set_listener(&s.listener);
  made->engine.set_workspace_sizes(s.workspace_sizes);
  for (const residency::Exemption& rule : s.exemptions) made->engine.ledger().add_exemption(rule);
  s.ranges.set_managed(*s.managed);
  s.ranges.set_piece(options.piece_bytes);
  return made;
}

Status open_device(State& s, DeviceLock& lock, int ordinal) {
  if (lock.device()) return {};
  UMEM_RETURN_IF_ERROR(look_at_driver(s));
  Result<driver::Place> found = find_place(s, ordinal);
  if (!found.ok()) return found.take_status();
  const bool mapped = s.mapped();
  if (mapped) {
    Status able = s.opened == 0
                      ? managed::MappedMemory::check_support(s.driver.table, ordinal)
                      : Status(Code::kNotSupported,
                               "backing=mapped serves one GPU, and another one is in use; choose "
                               "backing=managed, or one GPU by CUDA_VISIBLE_DEVICES");
    if (!able.ok()) {
      const Status released = release_place(s, found.value());
      (void)released;
      return able;
    }
  }
  if (s.opened == 0) s.ranges.set_mapped(mapped);
  Result<std::unique_ptr<Device>> made = make_device(s, found.value());
  if (made.ok()) {
    lock.slot().device = std::move(made.value());
    s.opened |= mask_of(ordinal);
    return {};
  }
  const Status released = release_place(s, found.value());
  (void)released;  // the first error is the one to report
  return made.take_status();
}

Status ensure_open(State& s, DeviceLock& lock, int ordinal) {
  if (lock.device()) return {};
  Status status;
  lock.unlock();  // lock order: the registry first
  {
    const std::lock_guard registry(s.registry);
    lock.lock();
    status = s.accepting && !s.forked ? open_device(s, lock, ordinal) : not_running(s);
  }
  return status;
}

Status close_devices(State& s) {
  FirstError error;
  each_ordinal(s.opened, [&](int ordinal) {
    std::unique_ptr<Device>& device = s.slot(ordinal).device;
    error.keep(close_device(*device));
    if (!error.ok()) return;
    const driver::Place place = device->place;
    device.reset();  // destroys its events, which needs the context
    s.opened &= ~mask_of(ordinal);
    error.keep(release_place(s, place));
  });
  UMEM_RETURN_IF_ERROR(error.take());
  return s.driver.kind == driver::Kind::kSoft ? soft::close() : Status();
}

}  // namespace umem::runtime
