// Op boundaries: the units of an op's inputs are pinned and fetched before it runs, and released
// after it.
#include "runtime/ops.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "base/format.h"
#include "base/thread_role.h"
#include "policy/plan.h"
#include "runtime/cuts.h"
#include "runtime/device_lock.h"
#include "runtime/op_use.h"
#include "runtime/record.h"
#include "runtime/victim_callback.h"

namespace umem::runtime {

namespace {

using managed::RangeId;

// An op's inputs, and the index of the first one that is in umem's memory.
struct Inputs {
  const Input* all;
  std::size_t count, first;
  RangeId first_id;
};

// In a program that uses umem for some of its memory, most ops have no such input, and need no
// lock.
Inputs find_first(const State& s, const Input* all, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    if (const RangeId id = s.ranges.find(all[i].storage); id != managed::kNoRange)
      return {all, count, i, id};
  return {all, count, count, managed::kNoRange};
}

// An op's stream belongs to its own device. Operands on another device are ordered by the stream
// that they were allocated on.
cu::CUstream stream_on(Device& device, const Op& op, RangeId used) {
  return device.place.device == op.device ? reinterpret_cast<cu::CUstream>(op.stream)
                                          : device.engine.ledger().at(used).stream;
}

}  // namespace

// Counts what umem could manage and does not.
static void count_unmanaged(State& s, const Input* all, std::size_t count) {
  const bool gpu = s.driver.kind != driver::Kind::kSoft;
  for (const Input* at = all; at != all + count; ++at)
    if (at->size >= kPageBytes && at->on_gpu == gpu &&
        s.ranges.find(at->storage) == managed::kNoRange)
      s.unmanaged.use(at->storage, at->bytes > 0 ? at->bytes : at->size);
}

// Only the software device counts page faults, and there is one of it.
static void warn_thrashing(State& s, const char* what, std::size_t bytes) {
  const DeviceLock lock(s.slot(0));
  Device* device = lock.device();
  if (!device || device->warned_thrashing || device->warned_above_budget) return;
  device->warned_thrashing = true;
  std::fprintf(
      stderr,
      "umem: warning: %s repeatedly touched more memory than the budget of %s; of that, %s stayed "
      "on the host. A larger budget ends it (logged once; umem.stats().zero_copy_bytes counts)\n",
      what, format_bytes(device->engine.limits().budget_bytes).c_str(),
      format_bytes(bytes).c_str());
}

static void end_operation(State& s, const char* what) {
  auto* const end = s.end_operation.load();
  const driver::Operation ended = end ? end() : driver::Operation();
  if (ended.faults > 0) {
    const std::lock_guard lock(s.faults_mutex);
    s.faults_of[what] += ended.faults;
  }
  if (ended.thrashed_bytes == 0) return;
  s.thrashed_bytes += ended.thrashed_bytes;
  warn_thrashing(s, what, ended.thrashed_bytes);
}

// Concurrent ops of several threads count as one operation. So does code between ops that touches
// memory itself.
static void begin_operating(State& s, Op& op) {
  if (!s.end_operation || op.scope_marker || op.n_pinned == 0) return;
  op.operating = true;
  if (s.operating++ == 0) end_operation(s, "code between two operators");
}

static void end_operating(State& s, const Op& op) {
  if (op.operating && --s.operating == 0) end_operation(s, *op.name ? op.name : "an op");
}

// Without a plan, a block is cut now if an op needs at most half of it and that half is not all on
// the device. With a plan, the cut waits for the next plan: a plan's tensors are the units of the
// step that was recorded.
static void cut_for_parts(State& s, Device& device, const Inputs& inputs) {
  const engine::Engine& engine = device.engine;
  if (engine.follows_plans() || !engine.active()) return;
  for (const Input* at = inputs.all + inputs.first; at != inputs.all + inputs.count; ++at) {
    const Input& input = *at;
    if (input.bytes == 0) continue;  // the common case
    const RangeId id = s.ranges.find(input.begin());
    if (id == managed::kNoRange || s.ranges.device_of(id) != device.place.device ||
        !engine.ledger().live(id) || !engine.ledger().away(id) || engine.ledger().at(id).segment ||
        engine.ledger().at(id).bytes < 2 * input.bytes)
      continue;
    s.ranges.cut_finer(s.ranges[s.ranges[id].head].bytes);
    cut_as_others(s, device, id);
  }
}

// Pins the inputs' units on one device and fetches those that are away. Returns the devices of the
// other inputs.
static DeviceMask bring_in_on(State& s, int ordinal, Op& op, const Inputs& inputs, bool recorded) {
  DeviceLock lock(s.slot(ordinal));
  const bool asked = s.victim_callback != nullptr;
  if (asked && lock.device() && !s.forked) {
    const KeptAddresses kept;
    ask_victims_for_inputs(s, inputs.all, inputs.count, lock);
  }
  if (!lock.device() || s.forked) return 0;
  Device& device = *lock.device();
  const residency::Ledger& ledger = device.engine.ledger();
  cut_for_parts(s, device, inputs);
  const std::uint32_t first = op.n_pinned;
  std::uint32_t written = first;
  const bool only = s.opened == mask_of(ordinal);  // the common case
  DeviceMask others = 0;
  for (std::size_t i = inputs.first; i < inputs.count; ++i) {
    const RangeId id = i == inputs.first ? inputs.first_id : s.ranges.find(inputs.all[i].storage);
    if (id == managed::kNoRange) continue;
    if (const int owner = only ? ordinal : s.ranges.device_of(id); owner != ordinal) {
      others |= mask_of(owner);
      continue;
    }
    each_used(s.ranges, inputs.all[i], id, [&](RangeId piece) {
      if (ledger.live(piece)) pin_slot(op, piece);
    });
    if (i < op.n_written) written = op.n_pinned;
  }
  if (written > first) device.engine.will_write(op.pinned + first, written - first);
  const std::uint64_t left_before = device.engine.counters().left_out;
  if (op.n_pinned > first)
    device.engine.begin_use(op.pinned + first, op.n_pinned - first,
                            stream_on(device, op, op.pinned[first]));
  if (device.engine.counters().left_out > left_before) note_above_budget(device, op);
  if (asked) device.engine.set_preferred_victims({});
  if (recorded) note_addresses(s, device, inputs.all, inputs.count);
  return others;
}

// Locks one device at a time: a device may be waiting for another thread's op, which may need a
// second device first.
static void bring_in(Op* op, const Input* all, std::size_t count) {
  State& s = state();
  if (s.accepting) count_unmanaged(s, all, count);
  const Inputs inputs = find_first(s, all, count);
  if (inputs.first == count || !s.open()) return;
  const bool recorded = op->trace.entered_ns != 0 && !op->scope_marker;
  if (recorded) begin_addresses(inputs.all, inputs.count);
  const int first = s.ranges.device_of(inputs.first_id);
  DeviceMask done = mask_of(first);
  DeviceMask left = bring_in_on(s, first, *op, inputs, recorded) & ~done;
  while (left != 0) {
    const int next = std::countr_zero(left);
    done |= mask_of(next);
    left = (left | bring_in_on(s, next, *op, inputs, recorded)) & ~done;
  }
  op->n_inputs = op->n_pinned;
  if (recorded) record_begin(s, *op);
}

void op_begin(Op* op, const Input* inputs, std::size_t count) noexcept {
  const bool recorded = trace::recording();
  op->trace.entered_ns = 0;  // if 0, only `open` of the other fields is read
  op->trace.open = nullptr;
  if (recorded) {
    op->trace = {};
    op->trace.enter();
  }
  Op* const parent = t_op;
  op->parent = parent;
  op->n_inputs = op->n_pinned = 0;
  op->above_budget = op->operating = false;
  op->pinned = op->inline_pinned;
  op->pinned_capacity = sizeof(Op::inline_pinned) / sizeof(std::uint32_t);
  if (parent) {
    if (op->family == residency::Family::kNone) op->family = parent->family;
    if (op->phase == Phase::kNone) op->phase = parent->phase;
  }
  if (op->phase == Phase::kBackward || op->phase == Phase::kOptimizer) runs_steps();
  t_op = op;
  bring_in(op, inputs, count);
  begin_operating(state(), *op);
  if (recorded) op->trace.begin();
}

// True if an operator of this thread is running, not only a range of the program.
static bool within_an_op() {
  for (const Op* op = t_op; op; op = op->parent)
    if (!op->scope_marker) return true;
  return false;
}

static residency::OpUse used_on(const State& s, const Op& op, int ordinal,
                                std::vector<RangeId>& own) {
  std::size_t inputs = 0;
  for (std::uint32_t i = 0; i < op.n_pinned; ++i) {
    if (s.ranges.device_of(op.pinned[i]) != ordinal) continue;
    own.push_back(op.pinned[i]);
    inputs += i < op.n_inputs ? 1 : 0;
  }
  return {own.data(), own.size(), inputs, policy::number_of(op.name), within_an_op()};
}

// Tags untagged operands of an exchange between ranks: buckets, and buffers that gather shards.
static void tag_exchanged(residency::Ledger& ledger, const residency::OpUse& used) {
  using residency::Tag;
  for (std::size_t i = 0; i < used.count; ++i) {
    if (!ledger.has(used.ids[i])) continue;
    const residency::Unit& unit = ledger.at(used.ids[i]);
    if (unit.tag == Tag::kInput || unit.tag == Tag::kTemp)
      ledger.set_tag(used.ids[i], Tag::kComm, unit.family);
  }
}

// A block that an inner op left, and that the op around it may still use unseen.
struct Left {
  int ordinal;
  RangeId id;
  std::uint64_t born;
};
static thread_local std::vector<Left> t_left;

static void note_left(const State& s, int ordinal, const residency::Ledger& ledger,
                      const residency::OpUse& used) {
  if (!s.ranges.mapped()) return;  // managed memory faults in
  for (std::size_t i = used.inputs; i < used.count; ++i)
    if (ledger.live(used.ids[i]) && ledger.at(used.ids[i]).fresh)
      t_left.push_back({ordinal, used.ids[i], ledger.at(used.ids[i]).born});
}

static void outermost_ended(State& s) {
  for (const Left& left : std::exchange(t_left, {})) {
    const DeviceLock lock(s.slot(left.ordinal));
    if (lock.device() && !s.forked) lock.device()->engine.outermost_ended(left.id, left.born);
  }
}

// Tags the op's blocks that outlive it, marks its operands as used now, and unpins them.
static void let_go_on(State& s, int ordinal, const Op& op, const residency::OpUse& used,
                      residency::Tag tag) {
  const DeviceLock lock(s.slot(ordinal));
  if (!lock.device() || s.forked) return;
  Device& device = *lock.device();
  residency::Ledger& ledger = device.engine.ledger();
  for (std::size_t i = used.inputs; i < used.count && tag != residency::Tag::kCount; ++i) {
    const RangeId id = used.ids[i];
    if (ledger.has(id) && ledger.at(id).tag == residency::Tag::kWorkspace)
      ledger.set_tag(id, tag, op.family);
  }
  if (op.exchanges) tag_exchanged(ledger, used);
  const cu::CUstream stream = used.count > 0 ? stream_on(device, op, used.ids[0])
                                             : reinterpret_cast<cu::CUstream>(op.stream);
  if (used.count > 0) device.engine.end_use(used.ids, used.count, stream, used.inner);
  if (used.inner) note_left(s, ordinal, ledger, used);
  if (op.collective) device.engine.begin_collective(used.ids, used.count);
  if (used.count > used.inputs)
    device.engine.left_behind(used.ids + used.inputs, used.count - used.inputs, op.family);
  if (device.engine.follows_plans() && !helps_only()) device.engine.op_ended(used, stream);
}

static void let_go(Op* op, residency::Tag tag) {
  State& s = state();
  if (op->trace.open) record_end(s, *op, t_op, tag);
  // With a single device, its policy is told of every recorded op.
  DeviceMask used = s.opened;
  if (!std::has_single_bit(used)) {
    used = 0;
    for (std::uint32_t i = 0; i < op->n_pinned; ++i)
      used |= mask_of(s.ranges.device_of(op->pinned[i]));
  }
  if (std::has_single_bit(used)) {  // the common case
    const std::int64_t name = policy::number_of(op->name);
    const residency::OpUse own{op->pinned, op->n_pinned, op->n_inputs, name, within_an_op()};
    let_go_on(s, std::countr_zero(used), *op, own, tag);
  } else {
    each_ordinal(used, [&](int ordinal) {
      std::vector<RangeId> own;
      let_go_on(s, ordinal, *op, used_on(s, *op, ordinal, own), tag);
    });
  }
  if (op->pinned != op->inline_pinned) std::free(op->pinned);
}

void op_end(Op* op, residency::Tag tag) noexcept {
  if (op->trace.entered_ns != 0) op->trace.end();
  // Usually the innermost op; programs can end ranges out of order.
  for (Op** link = &t_op; *link; link = &(*link)->parent) {
    if (*link != op) continue;
    *link = op->parent;
    break;
  }
  if (op->n_pinned > 0 || op->trace.open) let_go(op, tag);
  if (!t_left.empty() && !within_an_op()) outermost_ended(state());
  end_operating(state(), *op);
  if (op->trace.entered_ns != 0 && t_op) t_op->trace.leave(op->trace);
}

}  // namespace umem::runtime
