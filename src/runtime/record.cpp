#include "runtime/record.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/device_lock.h"
#include "runtime/recorder_lock.h"

namespace umem::runtime {
namespace {

using managed::RangeId;

// In the order of their allocation, which is known for large blocks. Small blocks share their
// segment's tag, which says nothing about them.
std::vector<trace::LiveBlock> live_blocks(const State& s, const HeldDevices& all) {
  std::vector<std::pair<std::uint64_t, trace::LiveBlock>> found;
  all.each([&](const Device& device) {
    const residency::Ledger& ledger = device.engine.ledger();
    for (const arena::SegmentRow& segment : device.arena.describe()) {
      for (const arena::BlockRow& block : segment.blocks) {
        if (!block.allocated) continue;
        const RangeId id = s.ranges.find(reinterpret_cast<const void*>(block.address));
        const bool tagged = segment.large && ledger.has(id);
        found.push_back(
            {tagged ? ledger.at(id).born : 0,
             {block.address, block.requested, tagged ? residency::name(ledger.at(id).tag) : "",
              tagged ? family_name(ledger.at(id).family) : "", device.place.device}});
      }
    }
  });
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<trace::LiveBlock> live;
  for (const auto& [born, block] : found) live.push_back(block);
  return live;
}

thread_local std::vector<trace::Used> t_used;  // the inputs of the op that begins

}  // namespace

// Holds every lock, so that each block is either live now or has an event later.
Status record_start(trace::Sink sink) {
  State& s = state();
  const std::lock_guard registry(s.registry);
  if (!s.accepting || s.forked) return not_running(s);
  const HeldDevices all(s, s.opened);
  const RecorderLock recorder(s);
  recorder->start(sink, recorder->any_on() ? std::vector<trace::LiveBlock>() : live_blocks(s, all),
                  s.driver.kind == driver::Kind::kCuda);
  return {};
}

void record_stop(trace::Sink sink) {
  RecorderLock(state())->stop(sink);
}

trace::Batch record_take(trace::Sink sink, bool all) {
  if (all) {
    const std::function<void()> wait = RecorderLock(state())->times();
    wait();
  }
  return RecorderLock(state())->take(sink, all);
}

std::size_t record_waiting(trace::Sink sink) {
  return RecorderLock(state())->waiting(sink);
}

KeptAddresses::KeptAddresses() {
  kept_.swap(t_used);
}

KeptAddresses::~KeptAddresses() {
  t_used.swap(kept_);
}

void begin_addresses(const Input* inputs, std::size_t count) {
  t_used.clear();
  for (std::size_t i = 0; i < count; ++i)
    t_used.push_back({reinterpret_cast<std::uintptr_t>(inputs[i].storage), 0, 0});
}

// A block that moves alone is the only one in its range, wherever in it the storage begins.
void note_addresses(const State& s, const Device& device, const Input* inputs, std::size_t count) {
  const residency::Ledger& ledger = device.engine.ledger();
  for (std::size_t i = 0; i < count; ++i) {
    const RangeId id = s.ranges.find(inputs[i].storage);
    if (id == managed::kNoRange || s.ranges.device_of(id) != device.place.device) continue;
    if (!ledger.has(id) || ledger.at(id).segment) continue;
    const std::uintptr_t base = s.ranges[s.ranges[id].head].base;
    t_used[i] = {base, 0, 0};
    if (inputs[i].bytes == 0) continue;
    t_used[i].begin = reinterpret_cast<std::uintptr_t>(inputs[i].begin()) - base;
    t_used[i].end = t_used[i].begin + inputs[i].bytes;
  }
}

void record_begin(State& s, Op& op) {
  std::optional<driver::Place> place;
  if (State::has_slot(op.device)) {
    const DeviceLock lock(s.slot(op.device));
    if (lock.device()) place = lock.device()->place;
  }
  const RecorderLock recorder(s);
  recorder->begin(op.trace, t_used.data(), t_used.size(), op.n_overwritten, op.n_written);
  if (place)
    recorder->time(op.trace, s.driver.table, *place, reinterpret_cast<cu::CUstream>(op.stream));
}

void record_end(State& s, Op& op, Op* parent, residency::Tag tag) {
  const RecorderLock recorder(s);
  recorder->timed(op.trace, reinterpret_cast<cu::CUstream>(op.stream),
                  parent ? &parent->trace : nullptr);
  recorder->end(op.trace, op.name, tag == residency::Tag::kCount ? nullptr : residency::name(tag),
                family_name(op.family));
}

}  // namespace umem::runtime
