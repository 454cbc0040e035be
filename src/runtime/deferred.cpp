#include "runtime/deferred.h"

#include <algorithm>
#include <utility>

#include "runtime/cache.h"
#include "runtime/pinned.h"
#include "runtime/recorder_lock.h"
#include "runtime/state.h"
#include "trace/recorder.h"

namespace umem::runtime {

// On the software device, cached memory is RAM that others lack.
static bool caches_ram(const State& s) {
  return s.driver.kind == driver::Kind::kSoft;
}

// A program whose shapes change leaves ranges that fit no request: the oldest of them are freed.
// All are once nothing lives, if they are RAM.
// A free does not trim mapped memory: it would have to wait for copies, behind which a callback may
// wait for the lock of Python that the caller of the free holds.
static void trim_if_large(const State& s, Device& device) {
  if (s.ranges.mapped()) return;
  const arena::Footprint footprint = device.arena.footprint();
  const bool empty = caches_ram(s) && footprint.live_bytes == 0;
  const std::size_t kept = empty ? 0 : device.max_live_bytes;
  if (footprint.cached_bytes <= 2 * kept + 64 * MiB) return;
  const Status trimmed = trim_cache(device, empty ? 0 : std::max(kept, kPageBytes));
  (void)trimmed;  // memory that the driver refuses to take back stays cached
}

bool free_block(State& s, Slot& slot, void* ptr) {
  const managed::RangeId id = s.ranges.find(ptr);  // again, under the lock
  if (id == managed::kNoRange || &s.slot_of(id) != &slot || !slot.device) return false;
  if (!s.open()) return s.forked;
  Device& device = *slot.device;
  // Before the block is freed: its addresses may be invalid afterwards.
  if (!device.pins.empty()) end_pins(s, device, ptr, device.arena.block_at(ptr).bytes);
  Result<arena::Freed> freed = device.arena.free(ptr);
  if (!freed.ok()) return false;
  if (trace::recording()) RecorderLock(s)->free(reinterpret_cast<std::uintptr_t>(ptr));
  ++slot.frees;
  const arena::Freed& block = freed.value();
  if (!device.scopes.empty()) device.scopes.erase(ptr);
  if (block.last_in_range) device.engine.retire(block.range);
  trim_if_large(s, device);
  return true;
}

void free_released(Slot& slot) {
  Released* newest = slot.released.exchange(nullptr);
  Released* oldest = nullptr;
  while (newest) {  // in the order of their release
    Released* before = std::exchange(newest->before, oldest);
    oldest = std::exchange(newest, before);
  }
  while (oldest) {
    const bool freed = free_block(state(), slot, oldest->block);
    (void)freed;  // the caller of `release` was told so already
    delete std::exchange(oldest, oldest->before);
  }
}

// Recording, other shapes and other plans leave ranges that later steps have no use for.
static void end_step(const State& s, Device& device) {
  device.engine.step_ended();
  give_up_layout(device);
  device.arena.step_ended();
  const arena::Footprint footprint = device.arena.footprint();
  // On a GPU, the driver holds the host memory of what has left until the range is freed.
  if (!caches_ram(s) && device.engine.ledger().host_bytes() == 0) return;
  if (footprint.cached_bytes <= footprint.live_bytes / 8) return;
  const Status trimmed = trim_cache(device, footprint.live_bytes / 8, true);
  (void)trimmed;  // memory that the driver refuses to take back stays cached
  if (device.arena.footprint().cached_bytes < footprint.cached_bytes && s.driver.give_back &&
      s.driver.disk.empty())
    s.driver.give_back();
}

void end_steps(Slot& slot) {
  for (unsigned left = slot.steps.exchange(0); left > 0; --left)
    if (slot.device && !state().forked) end_step(state(), *slot.device);
}

}  // namespace umem::runtime
