#include "runtime/layouts.h"

#include "runtime/cache.h"
#include "runtime/settle.h"

namespace umem::runtime {

// It serves no more blocks, and leaves like others.
static void retire(Device& device) {
  device.arena.retire_layout();
  device.engine.sharing().stays_no_longer();
}

Status install_layout(const std::vector<arena::LayoutEntry>& entries, std::size_t bytes,
                      int ordinal, bool stays) {
  State& s = state();
  if (!State::has_slot(ordinal)) return no_such_device(ordinal);
  DeviceLock lock(s.slot(ordinal));
  Device* device = s.open() ? lock.device() : nullptr;
  if (!device)
    return {
        Code::kBadState,
        "the layout's device is not open: call umem.enable() first (a GPU is opened by its first "
        "allocation)"};
  if (!device->engine.managed())
    return {Code::kNotSupported, "memory is not managed here, and its blocks share no pages"};
  if (s.captures > 0) return {Code::kBadState, "a graph is being captured; try again after it"};
  const bool mapped = s.ranges.mapped() != nullptr;
  if (mapped && !stays && !device->engine.fits_beside_live(bytes))
    return {Code::kNotSupported, "mapped memory has a layout only if it fits beside what lives"};
  if (const arena::Layout* earlier = device->arena.layout(); earlier && !earlier->idle()) {
    retire(*device);
    return {Code::kBadState, "blocks of an earlier layout are alive; try again after a step"};
  }
  // The memory that the layout's blocks used so far is in the cache.
  UMEM_RETURN_IF_ERROR(release_all_cached(lock));
  // Before the layout is there: to make room on the host, an idle one is removed.
  if (mapped && stays && !device->engine.make_room(bytes))
    return {Code::kNotSupported, "the layout does not fit beside what cannot leave"};
  UMEM_RETURN_IF_ERROR(device->arena.install_layout(entries, bytes));
  const arena::LayoutStatus at = device->arena.layout()->status();
  device->engine.sharing().open(at.base, at.bytes);
  if (!mapped) return {};
  Status joined = device->engine.sharing().join(stays);
  if (joined.ok()) return {};
  UMEM_RETURN_IF_ERROR(drop_idle_layout(*device));
  return joined;
}

void clear_layout(int ordinal) {
  State& s = state();
  if (!State::has_slot(ordinal)) return;
  const DeviceLock lock(s.slot(ordinal));
  Device* device = s.open() ? lock.device() : nullptr;
  if (!device) return;
  retire(*device);
  if (s.captures > 0) return;  // no memory is freed while some stream captures a graph
  const Status status = drop_idle_layout(*device);
  (void)status;  // the layout serves no block, and is freed at the latest by `stop`
}

arena::LayoutStatus layout_status(int ordinal) {
  State& s = state();
  if (!State::has_slot(ordinal)) return {};
  const DeviceLock lock(s.slot(ordinal));
  const Device* device = s.open() ? lock.device() : nullptr;
  const arena::Layout* layout = device ? device->arena.layout() : nullptr;
  return layout ? layout->status() : arena::LayoutStatus();
}

}  // namespace umem::runtime
