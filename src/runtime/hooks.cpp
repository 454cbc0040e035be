// The calls at operator speed: op boundaries, allocation, release.
#include "runtime/hooks.h"

#include <cstdlib>
#include <cstring>
#include <vector>

#include "runtime/record.h"
#include "runtime/state.h"

namespace umem::runtime {
namespace {

using backing::RangeId;

constinit thread_local Op* t_op = nullptr;  // top of this thread's op stack

// True if a pointer leads to memory of umem's: most ops of a program that uses umem for a part
// only need not take the lock.
bool any_owned(const State& s, const void* const* pointers, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    if (s.ranges.find(pointers[i]) != backing::kNoRange) return true;
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
    if (!device.engine.policy().follows()) return;
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

void fail(Failure* error, const Status& status) {
  thread_local std::string message;  // of the last failure on this thread
  if (!error) return;
  message = status.message();
  *error = {static_cast<int>(status.code()), message.c_str()};
}

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
  const bool advised = s.advisor != nullptr;
  if (advised) {
    advise_on_inputs(s, inputs, count, guard);
    if (!s.open()) return;  // it gave up the lock
  }
  for (std::size_t i = 0; i < count; ++i) {
    const RangeId id = s.ranges.find(inputs[i]);
    if (id == backing::kNoRange) continue;
    const residency::Ledger& ledger = s.owner(id).engine.ledger();
    s.ranges.each_piece(id, [&](RangeId piece) {
      if (ledger.live(piece)) pin_slot(*op, piece);
    });
  }
  op->n_inputs = op->n_pinned;
  by_device(s, *op, op->pinned, op->n_pinned,
            [](auto& engine, auto* ids, auto n, auto stream) { engine.begin_use(ids, n, stream); });
  if (advised) forget_advice(s);
  if (op->trace.entered_ns != 0 && !op->bracket) record_begin(s, *op, inputs, count);
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

// What the op allocated and leaves behind becomes `tag`.
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

void* allocate(std::size_t bytes, int device, std::uintptr_t stream, Failure* error) noexcept {
  if (error) *error = {};
  if (bytes == 0) return nullptr;
  Op* const op = t_op;
  const trace::Pause pause(op ? &op->trace : nullptr);
  State& s = state();
  std::unique_lock guard(s.mutex);
  const bool advised = s.accepting && s.advisor != nullptr;
  if (advised) advise_on_block(s, bytes, device, guard);
  if (!s.accepting || s.forked) {
    fail(error, {Code::kBadState,
                 s.forked ? "the process was forked after it had used a GPU; start workers by spawn"
                          : "umem is not running; call umem.enable() first"});
    return nullptr;
  }
  Result<void*> result =
      allocate_locked(s, bytes, device, reinterpret_cast<cu::CUstream>(stream), op);
  if (advised) forget_advice(s);
  if (result.ok()) return result.value();
  ++s.counts.ooms;
  fail(error, result.take_status());
  return nullptr;
}

bool release(void* ptr) noexcept {
  State& s = state();
  if (!owns(ptr)) return false;
  std::lock_guard guard(s.mutex);
  const RangeId id = s.ranges.find(ptr);  // under the lock: it may have gone
  if (id == backing::kNoRange) return false;
  if (!s.open()) return s.forked;
  Device& device = s.owner(id);
  // Before: the addresses may lead nowhere afterwards.
  if (!s.holds.empty()) end_holds(s, ptr, device.arena.block_at(ptr).bytes);
  Result<arena::Freed> freed = device.arena.free(ptr);
  if (!freed.ok()) return false;
  if (trace::recording()) trace::recorder().free(reinterpret_cast<std::uintptr_t>(ptr));
  ++s.counts.frees;
  const arena::Freed& block = freed.value();
  s.scopes.forget(ptr);
  if (block.last_in_range) device.engine.retire(block.range);
  // Programs of changing shapes leave ranges behind that no request fits: give the oldest back.
  const arena::Footprint footprint = device.arena.footprint();
  if (footprint.cached_bytes > 2 * device.most_live_bytes + 64 * MiB) {
    Status trimmed = trim_locked(device, device.most_live_bytes);
    (void)trimmed;  // what the driver refuses to take back stays cached
  }
  return true;
}

bool record_stream(const void* ptr, std::uintptr_t stream) noexcept {
  State& s = state();
  if (!owns(ptr)) return false;
  std::lock_guard guard(s.mutex);
  const RangeId id = s.ranges.find(ptr);  // under the lock: it may have gone
  if (id == backing::kNoRange) return false;
  return s.open() &&
         s.owner(id)
             .arena.record_stream(const_cast<void*>(ptr), reinterpret_cast<cu::CUstream>(stream))
             .ok();
}

bool owns(const void* ptr) noexcept {
  return state().ranges.find(ptr) != backing::kNoRange;
}

// Calls `change` with the ledger and the unit of a live large block: a segment holds many blocks,
// and keeps its own tag.
template <class Change>
static bool change_label(const void* ptr, residency::Tag tag, Change change) {
  State& s = state();
  if (!owns(ptr)) return false;
  std::lock_guard guard(s.mutex);
  const RangeId id = s.ranges.find(ptr);  // under the lock: it may have gone
  if (id == backing::kNoRange) return false;
  if (!s.open()) return false;
  if (trace::recording())
    trace::recorder().tag(reinterpret_cast<std::uintptr_t>(ptr), residency::name(tag));
  residency::Ledger& ledger = s.owner(id).engine.ledger();
  if (!ledger.has(id)) return false;
  s.ranges.each_piece(id, [&](RangeId piece) {
    if (ledger.live(piece) && !ledger.at(piece).segment) change(ledger, piece);
  });
  return true;
}

bool tag(const void* ptr, residency::Tag tag) noexcept {
  return change_label(ptr, tag, [tag](residency::Ledger& ledger, RangeId id) {
    ledger.set_tag(id, tag, ledger.at(id).family);
  });
}

bool label(const void* ptr, residency::Tag tag, residency::Family family) noexcept {
  return change_label(
      ptr, tag, [=](residency::Ledger& ledger, RangeId id) { ledger.set_tag(id, tag, family); });
}

}  // namespace umem::runtime
