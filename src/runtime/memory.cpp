// Allocation and release: where arena and residency meet.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "base/format.h"
#include "runtime/state.h"

namespace umem::runtime {
namespace {

using backing::RangeId;
using residency::Family;
using residency::Tag;

struct Purpose {
  Tag tag;
  Family family;
};

// What a block allocated under `op` is for, until the op's end tells more.
Purpose purpose(const Op* op) {
  if (!op) return {Tag::kInput, Family::kNone};
  if (!op->bracket) return {Tag::kWorkspace, op->family};
  return {op->phase == Phase::kOptimizer ? Tag::kOptimizer : Tag::kTemp, op->family};
}

void warn_larger_than_budget(State& s, std::size_t bytes) {
  if (bytes <= s.options.budget_bytes || s.warned_larger_than_budget) return;
  s.warned_larger_than_budget = true;
  std::fprintf(stderr,
               "umem: warning: a block of %s is larger than the budget of %s; it works by page "
               "faults, slowly (said once)\n",
               format_bytes(bytes).c_str(), format_bytes(s.options.budget_bytes).c_str());
}

Result<arena::Allocation> take_block(State& s, std::size_t bytes, cu::CUstream stream) {
  retire_reclaimed(s);
  Result<arena::Allocation> block = s.arena->allocate(bytes, stream);
  if (block.ok()) return block;
  UMEM_RETURN_IF_ERROR(trim_locked(s, 0));  // there is no more: give back what we do not use
  return s.arena->allocate(bytes, stream);
}

}  // namespace

// The ranges of blocks whose cross-stream uses completed are dead from here on.
void retire_reclaimed(State& s) {
  std::vector<RangeId> reclaimed;
  const Status status = s.arena->poll(&reclaimed);
  (void)status;  // those that failed are asked again at the next allocation; the rest are dead now
  for (RangeId id : reclaimed) s.engine->retire(id);
}

Status trim_locked(State& s, std::size_t keep_bytes) {
  std::vector<RangeId> released;
  Status status = s.arena->trim(keep_bytes, &released);
  for (RangeId id : released) s.engine->forget(id);
  return status;
}

Result<void*> allocate_locked(State& s, std::size_t bytes, cu::CUstream stream, Op* op) {
  Result<arena::Allocation> taken = take_block(s, bytes, stream);
  if (!taken.ok()) {
    const Status status = taken.take_status();
    return out_of_memory(s, status.code(), bytes, status.message());
  }
  const arena::Allocation& block = taken.value();
  if (block.first_in_range) {
    warn_larger_than_budget(s, block.bytes);
    const Purpose why = block.large ? purpose(op) : Purpose{Tag::kPool, Family::kNone};
    const std::size_t unit_bytes = block.large ? block.bytes : kPageBytes;
    Status admitted = s.engine->admit(block.range, unit_bytes, !block.large, why.tag, why.family);
    if (!admitted.ok()) {
      const Result<arena::Freed> undone = s.arena->free(block.ptr);
      if (undone.ok() && undone.value().last_in_range && s.engine->ledger().has(block.range))
        s.engine->retire(block.range);
      return out_of_memory(s, admitted.code(), bytes, admitted.message());
    }
  } else {
    s.engine->prepare(block.range);
  }
  // In use by the op that asked for it, so not the one to leave while that op runs.
  if (op && !op->bracket) pin(*op, block.range);
  ++s.counts.allocs;
  const std::size_t live = s.arena->footprint().live_bytes;
  s.peak_live_bytes = std::max(s.peak_live_bytes, live);
  s.most_live_bytes = std::max(s.most_live_bytes, live);
  return block.ptr;
}

Status out_of_memory(const State& s, Code code, std::size_t bytes, const std::string& why) {
  const residency::Ledger& ledger = s.engine->ledger();
  struct Holder {
    std::size_t bytes;
    RangeId id;
  };
  std::vector<Holder> holders;
  std::size_t evictable = 0;
  for (RangeId id = 1; id < ledger.capacity(); ++id) {
    const residency::Unit& unit = ledger.at(id);
    if (unit.state == residency::State::kDevice && unit.pins == 0) evictable += unit.bytes;
    const bool live = unit.state != residency::State::kNone &&
                      unit.state != residency::State::kDead &&
                      unit.state != residency::State::kGone;
    if (live) holders.push_back({unit.bytes, id});
  }
  const std::size_t shown = std::min<std::size_t>(3, holders.size());
  std::partial_sort(holders.begin(), holders.begin() + static_cast<std::ptrdiff_t>(shown),
                    holders.end(),
                    [](const Holder& a, const Holder& b) { return a.bytes > b.bytes; });
  std::string text =
      "umem out of memory: asked for " + format_bytes(bytes) + "; budget " +
      format_bytes(s.engine->limits().budget_bytes) + ", resident " +
      format_bytes(ledger.resident_bytes()) + ", evictable " + format_bytes(evictable) + ", live " +
      format_bytes(ledger.live_bytes()) + ", host " + format_bytes(ledger.host_bytes()) + " of " +
      (s.engine->limits().host_budget_bytes ? format_bytes(s.engine->limits().host_budget_bytes)
                                            : std::string("unbounded")) +
      ". " + why + ". Largest holders:";
  for (std::size_t i = 0; i < shown; ++i) {
    const residency::Unit& unit = ledger.at(holders[i].id);
    text += (i ? ", " : " ") + format_bytes(unit.bytes) + " " + residency::name(unit.tag) + "/" +
            residency::name(unit.family) + " (" + residency::name(unit.state) + ")";
  }
  text += shown ? "." : " none.";
  return {code, std::move(text)};
}

}  // namespace umem::runtime
