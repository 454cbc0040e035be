#include "runtime/op_use.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/format.h"
#include "runtime/state.h"

namespace umem::runtime {

using managed::RangeId;

constinit thread_local Op* t_op = nullptr;

// Grows past the inline array by doubling; an op that cannot record a pin goes without it.
void pin_slot(Op& op, RangeId id) {
  constexpr std::uint32_t kInline = sizeof(Op::inline_pinned) / sizeof(std::uint32_t);
  if (op.n_pinned == op.pinned_capacity) {
    const std::uint32_t capacity = op.pinned_capacity * 2;
    const bool on_heap = op.pinned_capacity > kInline;
    void* memory = std::realloc(on_heap ? op.pinned : nullptr, capacity * sizeof(std::uint32_t));
    if (!memory) return;
    if (!on_heap) std::memcpy(memory, op.inline_pinned, sizeof op.inline_pinned);
    op.pinned = static_cast<std::uint32_t*>(memory);
    op.pinned_capacity = capacity;
  }
  op.pinned[op.n_pinned++] = id;
}

void pin(Op& op, Device& device, RangeId id) {
  residency::Ledger& ledger = device.engine.ledger();
  state().ranges.each_piece(id, [&](RangeId piece) {
    const std::uint32_t before = op.n_pinned;
    if (ledger.live(piece)) pin_slot(op, piece);
    if (op.n_pinned > before) ledger.pin(piece);
  });
}

void warn_above_budget(Device& device, const char* what, std::size_t bytes) {
  if (device.warned_above_budget) return;
  device.warned_above_budget = true;
  const bool zero_copy = device.engine.counters().zero_copy_bytes > 0;
  std::fprintf(
      stderr,
      "umem: warning: %s needs %s at once, which is larger than the budget of %s; what does "
      "not fit %s, slowly. A budget of %s ends that; smaller batches, or the "
      "same work in parts, need less (logged once; umem.summary() counts such ops)\n",
      what, format_bytes(bytes).c_str(), format_bytes(device.engine.limits().budget_bytes).c_str(),
      zero_copy ? "is used in the host's memory" : "moves by page faults",
      format_bytes(bytes).c_str());
}

void note_above_budget(Device& device, Op& op) {
  const residency::Ledger& ledger = device.engine.ledger();
  std::vector<RangeId> used;
  for (const Op* around = &op; around; around = around->parent)
    used.insert(used.end(), around->pinned, around->pinned + around->n_pinned);
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  std::size_t bytes = 0;
  for (const RangeId id : used)
    if (state().ranges.device_of(id) == device.place.device && ledger.live(id))
      bytes += ledger.at(id).bytes;
  // Otherwise other threads' ops, or the program's pins, leave too little room.
  if (bytes <= device.engine.limits().budget_bytes) return;
  device.largest_op_bytes = std::max(device.largest_op_bytes, bytes);
  if (op.above_budget) return;
  op.above_budget = true;
  ++device.ops_above_budget;
  warn_above_budget(device, *op.name ? op.name : "an op", bytes);
}

}  // namespace umem::runtime
