#include "runtime/record.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "runtime/state.h"

namespace umem::runtime {
namespace {

using managed::RangeId;

// In the order of their allocation, as far as that is known: of large ones. Small blocks share
// their segment's tag, which says nothing of them.
std::vector<trace::LiveBlock> live_blocks(const State& s) {
  std::vector<std::pair<std::uint64_t, trace::LiveBlock>> found;
  s.each([&](const Device& device) {
    const residency::Ledger& ledger = device.engine.ledger();
    for (const arena::SegmentRow& segment : device.arena.describe()) {
      for (const arena::BlockRow& block : segment.blocks) {
        if (!block.allocated) continue;
        const RangeId id = s.ranges.find(reinterpret_cast<const void*>(block.address));
        const bool tagged = segment.large && ledger.has(id);
        found.push_back(
            {tagged ? ledger.at(id).born : 0,
             {block.address, block.requested, tagged ? residency::name(ledger.at(id).tag) : "",
              tagged ? family_name(ledger.at(id).family) : ""}});
      }
    }
  });
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<trace::LiveBlock> live;
  for (const auto& [born, block] : found) live.push_back(block);
  return live;
}

const Device* device_of(const State& s, const Op& op) {
  return op.device < 0 ? nullptr : s.device(op.device);
}

// A block that moves alone is its range's only one, wherever in it the storage begins.
std::uintptr_t block_address(const State& s, const void* pointer) {
  const RangeId id = s.ranges.find(pointer);
  const bool alone = id != managed::kNoRange && s.owner(id).engine.ledger().has(id) &&
                     !s.owner(id).engine.ledger().at(id).segment;
  return alone ? s.ranges[s.ranges[id].head].base : reinterpret_cast<std::uintptr_t>(pointer);
}

}  // namespace

const char* family_name(residency::Family family) {
  return family == residency::Family::kNone ? "" : residency::name(family);
}

Status record_start(trace::Sink sink) {
  State& s = state();
  std::lock_guard guard(s.mutex);
  if (!s.accepting || s.forked)
    return {Code::kBadState, "umem is not running; call umem.enable() first"};
  trace::Recorder& recorder = trace::recorder();
  recorder.start(sink, recorder.any_on() ? std::vector<trace::LiveBlock>() : live_blocks(s),
                 s.driver.kind == driver::Kind::kCuda);
  return {};
}

void record_stop(trace::Sink sink) {
  std::lock_guard guard(state().mutex);
  trace::recorder().stop(sink);
}

trace::Batch record_take(trace::Sink sink, bool all) {
  std::lock_guard guard(state().mutex);
  return trace::recorder().take(sink, all);
}

std::size_t record_waiting(trace::Sink sink) {
  std::lock_guard guard(state().mutex);
  return trace::recorder().waiting(sink);
}

void record_begin(State& s, Op& op, const void* const* inputs, std::size_t count) {
  thread_local std::vector<std::uintptr_t> addresses;
  addresses.clear();
  for (std::size_t i = 0; i < count; ++i) addresses.push_back(block_address(s, inputs[i]));
  trace::recorder().begin(op.trace, addresses.data(), count, op.n_overwritten, op.n_written);
  if (const Device* device = device_of(s, op))
    trace::recorder().time(op.trace, s.driver.table, device->place,
                           reinterpret_cast<cu::CUstream>(op.stream));
}

void record_end(Op& op, Op* parent, residency::Tag tag) {
  trace::Recorder& recorder = trace::recorder();
  recorder.timed(op.trace, reinterpret_cast<cu::CUstream>(op.stream),
                 parent ? &parent->trace : nullptr);
  recorder.end(op.trace, op.name, tag == residency::Tag::kCount ? nullptr : residency::name(tag),
               family_name(op.family));
}

}  // namespace umem::runtime
