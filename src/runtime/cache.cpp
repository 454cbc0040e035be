#include "runtime/cache.h"

#include <vector>

#include "runtime/device.h"

namespace umem::runtime {

using managed::RangeId;

Status drop_idle_layout(Device& device) {
  const arena::Layout* layout = device.arena.layout();
  if (!layout || !layout->idle()) return {};
  for (RangeId view : layout->subranges())
    if (device.engine.in_use(view)) return {};  // freed inside the op that is still using it
  const arena::LayoutStatus at = layout->status();
  device.engine.finish_retired();  // before its addresses are freed
  device.engine.sharing().close();
  Status status = device.arena.remove_layout();
  if (!status.ok()) device.engine.sharing().open(at.base, at.bytes);
  return status;
}

void give_up_layout(Device& device) {
  if (!device.engine.sharing().parted()) return;
  device.arena.retire_layout();
  const Status dropped = drop_idle_layout(device);
  (void)dropped;  // its addresses are kept; it has no memory but that of live blocks
}

// The ranges of blocks whose uses on other streams have completed are dead from now on.
void retire_reclaimed(Device& device) {
  std::vector<RangeId> reclaimed;
  const Status status = device.arena.poll(&reclaimed);
  (void)status;  // failed queries are repeated at the next allocation; all others are dead now
  for (RangeId id : reclaimed) device.engine.retire(id);
}

Status trim_cache(Device& device, std::size_t keep_bytes, bool idle) {
  // No memory is freed while some stream captures a graph.
  if (device.place.captures && *device.place.captures > 0) return {};
  const auto leaving = [&](RangeId id) {
    // Freed inside the op that is still using it.
    if (device.engine.in_use(id)) return false;
    // On a GPU only the host's memory is scarce: the device's serves other blocks anyway.
    if (idle && device.frees_on_thread() && device.engine.host_bytes(id) == 0) return false;
    const engine::Ticket departure = device.engine.forget(id);
    if (device.frees_on_thread())
      device.freer.comes_after(departure);
    else
      device.engine.wait_issued(departure);
    return true;
  };
  UMEM_RETURN_IF_ERROR(device.arena.trim(keep_bytes, leaving, idle));
  return keep_bytes == 0 && !idle ? drop_idle_layout(device) : Status();
}

}  // namespace umem::runtime
