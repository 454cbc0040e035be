#include "runtime/victim_callback.h"

#include <algorithm>
#include <utility>

#include "runtime/device_lock.h"
#include "runtime/op_use.h"

namespace umem::runtime {
namespace {

using residency::RangeId;

constinit thread_local bool t_asking = false;

Shortage look(const engine::Engine& engine, std::size_t need, const std::vector<RangeId>& needed) {
  const residency::Ledger& ledger = engine.ledger();
  const residency::CandidateView view = engine.view();
  Shortage result{need, ledger.resident_bytes(), engine.limits().budget_bytes, {}};
  for (RangeId id = ledger.oldest_resident(); id != residency::kNoRange; id = ledger.at(id).newer) {
    if (!view.evictable(id) || std::find(needed.begin(), needed.end(), id) != needed.end())
      continue;
    const residency::Unit& unit = ledger.at(id);
    result.candidates.push_back(
        {id, unit.bytes, unit.tag, unit.family, unit.last_use, unit.segment});
  }
  return result;
}

// Calls the callback without the lock, which is held before and after.
void ask(State& s, VictimCallback callback, const Shortage& shortage, DeviceLock& lock) {
  std::vector<RangeId> ids;
  lock.without([&] {
    t_asking = true;
    callback(shortage, ids);
    t_asking = false;
  });
  if (s.open()) lock.device()->engine.set_preferred_victims(std::move(ids));
}

}  // namespace

void set_victim_callback(VictimCallback callback) noexcept {
  state().victim_callback = callback;
}

void ask_victims_for_inputs(State& s, const Input* inputs, std::size_t count, DeviceLock& lock) {
  const VictimCallback callback = s.victim_callback;
  if (!callback || t_asking) return;
  const engine::Engine& engine = lock.device()->engine;
  const residency::CandidateView view = engine.view();
  std::vector<RangeId> needed;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const RangeId found = s.ranges.find(inputs[i].storage);
    if (found == residency::kNoRange || &s.slot_of(found) != &lock.slot()) continue;
    each_used(s.ranges, inputs[i], found, [&](RangeId id) {
      if (!view.live(id) || std::find(needed.begin(), needed.end(), id) != needed.end()) return;
      needed.push_back(id);
      if (view.away(id)) bytes += engine.ledger().at(id).bytes;
    });
  }
  const std::size_t need = bytes > 0 ? engine.shortage(bytes) : 0;
  if (need > 0) ask(s, callback, look(engine, need, needed), lock);
}

void ask_victims_for_block(State& s, std::size_t bytes, DeviceLock& lock) {
  const VictimCallback callback = s.victim_callback;
  // Small blocks need a page now and then, and it is not known in advance when.
  if (!callback || t_asking || bytes < kPageBytes || !s.open()) return;
  const Device* device = lock.device();
  if (!device) return;
  const std::size_t need = device->engine.shortage(align_up(bytes, kPageBytes));
  if (need > 0) ask(s, callback, look(device->engine, need, {}), lock);
}

}  // namespace umem::runtime
