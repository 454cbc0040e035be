// Op boundaries: the units of an op's inputs are pinned and fetched before it runs, and released
// after it.
#include "runtime/ops.h"

#include <cstdlib>
#include <cstring>
#include <vector>

#include "runtime/record.h"
#include "runtime/state.h"

namespace umem::runtime {

constinit thread_local Op* t_op = nullptr;

namespace {

using managed::RangeId;

// True if a pointer leads to memory of umem's: most ops of a program that uses umem for a part
// only need not take the lock.
bool any_owned(const State& s, const void* const* pointers, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    if (s.ranges.find(pointers[i]) != managed::kNoRange) return true;
  return false;
}

// Calls `act` with the engine and the stream of every run of units on one device. An op's stream is
// on its own device; what it uses of another is ordered by the stream that it was made on.
template <class Act>
void by_device(State& s, const Op& op, const RangeId* ids, std::size_t count, Act act) {
  const bool one = s.devices.size() == 1;
  for (std::size_t first = 0, next = 0; first < count; first = next) {
    Device& device = s.owner(ids[first]);
    if (one) next = count;
    while (next < count && &s.owner(ids[next]) == &device) ++next;
    const cu::CUstream stream = device.place.device == op.device
                                    ? reinterpret_cast<cu::CUstream>(op.stream)
                                    : device.engine.ledger().at(ids[first]).stream;
    act(device.engine, ids + first, next - first, stream);
  }
}

// Tells the engine of every device that the op used units of that it is over.
void end_on_devices(State& s, const Op& op) {
  s.each([&](Device& device) {
    if (!device.engine.policy().is_planned()) return;
    const auto stream = reinterpret_cast<cu::CUstream>(op.stream);
    if (s.devices.size() == 1) return device.engine.op_ended(op.pinned, op.n_pinned, stream);
    std::vector<RangeId> own;
    for (std::uint32_t i = 0; i < op.n_pinned; ++i)
      if (&s.owner(op.pinned[i]) == &device) own.push_back(op.pinned[i]);
    if (own.empty()) return;
    const bool here = device.place.device == op.device;
    device.engine.op_ended(own.data(), own.size(),
                           here ? stream : device.engine.ledger().at(own.front()).stream);
  });
}

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

}  // namespace

void pin(Op& op, RangeId id) {
  const State& s = state();
  residency::Ledger& ledger = s.owner(id).engine.ledger();
  s.ranges.each_piece(id, [&](RangeId piece) {
    const std::uint32_t before = op.n_pinned;
    if (ledger.live(piece)) pin_slot(op, piece);
    if (op.n_pinned > before) ledger.pin(piece);
  });
}

// Pins the units of the inputs, and fetches those that are away.
static void bring_in(Op* op, const void* const* inputs, std::size_t count) {
  State& s = state();
  if (!any_owned(s, inputs, count)) return;
  std::unique_lock guard(s.mutex);
  if (!s.open()) return;
  const bool asked = s.victim_callback != nullptr;
  if (asked) {
    ask_victims_for_inputs(s, inputs, count, guard);
    if (!s.open()) return;  // it gave up the lock
  }
  for (std::size_t i = 0; i < count; ++i) {
    const RangeId id = s.ranges.find(inputs[i]);
    if (id == managed::kNoRange) continue;
    const residency::Ledger& ledger = s.owner(id).engine.ledger();
    s.ranges.each_piece(id, [&](RangeId piece) {
      if (ledger.live(piece)) pin_slot(*op, piece);
    });
  }
  op->n_inputs = op->n_pinned;
  by_device(s, *op, op->pinned, op->n_pinned,
            [](auto& engine, auto* ids, auto n, auto stream) { engine.begin_use(ids, n, stream); });
  if (asked) forget_victims(s);
  if (op->trace.entered_ns != 0 && !op->scope_marker) record_begin(s, *op, inputs, count);
}

void op_begin(Op* op, const void* const* inputs, std::size_t count) noexcept {
  const bool recorded = trace::recording();
  op->trace.entered_ns = 0;  // without which nothing reads the rest, but for `open`
  op->trace.open = nullptr;
  if (recorded) {
    op->trace = {};
    op->trace.enter();
  }
  Op* const parent = t_op;
  op->parent = parent;
  op->n_inputs = op->n_pinned = 0;
  op->pinned = op->inline_pinned;
  op->pinned_capacity = sizeof(Op::inline_pinned) / sizeof(std::uint32_t);
  if (parent) {
    if (op->family == residency::Family::kNone) op->family = parent->family;
    if (op->phase == Phase::kNone) op->phase = parent->phase;
  }
  t_op = op;
  bring_in(op, inputs, count);
  if (recorded) op->trace.begin();
}

// Tags what the op allocated and what outlives it.
static void tag_results(State& s, const Op& op, residency::Tag tag) {
  if (tag == residency::Tag::kCount) return;
  for (std::uint32_t i = op.n_inputs; i < op.n_pinned; ++i) {
    const RangeId id = op.pinned[i];
    residency::Ledger& ledger = s.owner(id).engine.ledger();
    if (ledger.has(id) && ledger.at(id).tag == residency::Tag::kWorkspace)
      ledger.set_tag(id, tag, op.family);
  }
}

// Marks what the op used as used now, and unpins it.
static void let_go(Op* op, residency::Tag tag) {
  State& s = state();
  {
    std::lock_guard guard(s.mutex);
    if (op->trace.open) record_end(*op, t_op, tag);
    if (s.open()) {
      tag_results(s, *op, tag);
      by_device(s, *op, op->pinned, op->n_pinned, [](auto& engine, auto* ids, auto n, auto stream) {
        engine.end_use(ids, n, stream);
      });
      by_device(
          s, *op, op->pinned + op->n_inputs, op->n_pinned - op->n_inputs,
          [&](auto& engine, auto* ids, auto n, auto) { engine.left_behind(ids, n, op->family); });
      end_on_devices(s, *op);
    }
  }
  if (op->pinned != op->inline_pinned) std::free(op->pinned);
}

void op_end(Op* op, residency::Tag tag) noexcept {
  if (op->trace.entered_ns != 0) op->trace.end();
  // Innermost, nearly always; programs can end ranges out of order.
  for (Op** link = &t_op; *link; link = &(*link)->parent) {
    if (*link != op) continue;
    *link = op->parent;
    break;
  }
  if (op->n_pinned > 0 || op->trace.open) let_go(op, tag);
  if (op->trace.entered_ns != 0 && t_op) t_op->trace.leave(op->trace);
}

}  // namespace umem::runtime
