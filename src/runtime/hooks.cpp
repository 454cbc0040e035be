// The calls at operator speed: op boundaries, allocation, release.
#include "runtime/hooks.h"

#include <cstdlib>
#include <cstring>

#include "runtime/state.h"

namespace umem::runtime {
namespace {

using backing::RangeId;

constinit thread_local Op* t_op = nullptr;  // top of this thread's op stack

void fail(Failure* error, const Status& status) {
  thread_local std::string message;  // of the last failure on this thread
  if (!error) return;
  message = status.message();
  *error = {static_cast<int>(status.code()), message.c_str()};
}

// True if a pointer leads to memory of umem's: most ops of a program that uses umem for a part
// only need not take the lock.
bool any_owned(const State& s, const void* const* pointers, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    if (s.ranges.find(pointers[i]) != backing::kNoRange) return true;
  return false;
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
  const std::uint32_t before = op.n_pinned;
  pin_slot(op, id);
  if (op.n_pinned > before) state().engine->ledger().pin(id);
}

void op_begin(Op* op, const void* const* inputs, std::size_t count) noexcept {
  op->parent = t_op;
  op->n_inputs = op->n_pinned = 0;
  op->pinned = op->inline_pinned;
  op->pinned_capacity = sizeof(Op::inline_pinned) / sizeof(std::uint32_t);
  if (t_op) {
    if (op->family == residency::Family::kNone) op->family = t_op->family;
    if (op->phase == Phase::kNone) op->phase = t_op->phase;
  }
  t_op = op;
  State& s = state();
  if (!any_owned(s, inputs, count)) return;
  std::lock_guard guard(s.mutex);
  if (!s.open()) return;
  for (std::size_t i = 0; i < count; ++i) {
    const RangeId id = s.ranges.find(inputs[i]);
    if (s.engine->ledger().has(id)) pin_slot(*op, id);
  }
  op->n_inputs = op->n_pinned;
  s.engine->begin_use(op->pinned, op->n_pinned);
}

void op_end(Op* op, residency::Tag tag) noexcept {
  // Innermost, nearly always; programs can end ranges out of order.
  for (Op** link = &t_op; *link; link = &(*link)->parent) {
    if (*link != op) continue;
    *link = op->parent;
    break;
  }
  if (op->n_pinned == 0) return;
  State& s = state();
  {
    std::lock_guard guard(s.mutex);
    if (s.open()) {
      residency::Ledger& ledger = s.engine->ledger();
      for (std::uint32_t i = op->n_inputs; i < op->n_pinned && tag != residency::Tag::kCount; ++i)
        if (ledger.has(op->pinned[i]) && ledger.at(op->pinned[i]).tag == residency::Tag::kWorkspace)
          ledger.set_tag(op->pinned[i], tag, op->family);
      s.engine->end_use(op->pinned, op->n_pinned);
    }
  }
  if (op->pinned != op->inline_pinned) std::free(op->pinned);
}

void* allocate(std::size_t bytes, std::uintptr_t stream, Failure* error) noexcept {
  if (error) *error = {};
  if (bytes == 0) return nullptr;
  State& s = state();
  std::lock_guard guard(s.mutex);
  if (!s.open() || !s.accepting) {
    fail(error, {Code::kBadState, "umem is not running; call umem.enable() first"});
    return nullptr;
  }
  Result<void*> result = allocate_locked(s, bytes, reinterpret_cast<cu::CUstream>(stream), t_op);
  if (result.ok()) return result.value();
  ++s.counts.ooms;
  fail(error, result.take_status());
  return nullptr;
}

bool release(void* ptr) noexcept {
  State& s = state();
  if (!owns(ptr)) return false;
  std::lock_guard guard(s.mutex);
  if (!s.open()) return false;
  Result<arena::Freed> freed = s.arena->free(ptr);
  if (!freed.ok()) return false;
  ++s.counts.frees;
  const arena::Freed& block = freed.value();
  if (block.last_in_range) s.engine->retire(block.range);
  // Programs of changing shapes leave ranges behind that no request fits: give the oldest back.
  const std::size_t cached = s.ranges.total_bytes() - s.arena->footprint().live_bytes;
  if (cached > 2 * s.most_live_bytes + 64 * MiB) {
    Status trimmed = trim_locked(s, s.most_live_bytes);
    (void)trimmed;  // what the driver refuses to take back stays cached
  }
  return true;
}

bool record_stream(const void* ptr, std::uintptr_t stream) noexcept {
  State& s = state();
  if (!owns(ptr)) return false;
  std::lock_guard guard(s.mutex);
  return s.open() &&
         s.arena->record_stream(const_cast<void*>(ptr), reinterpret_cast<cu::CUstream>(stream))
             .ok();
}

bool owns(const void* ptr) noexcept {
  return state().ranges.find(ptr) != backing::kNoRange;
}

bool tag(const void* ptr, residency::Tag tag) noexcept {
  State& s = state();
  const RangeId id = s.ranges.find(ptr);
  if (id == backing::kNoRange) return false;
  std::lock_guard guard(s.mutex);
  if (!s.open() || !s.engine->ledger().has(id)) return false;
  // A segment holds many blocks: it keeps its own tag.
  const residency::Unit& unit = s.engine->ledger().at(id);
  if (!unit.segment) s.engine->ledger().set_tag(id, tag, unit.family);
  return true;
}

}  // namespace umem::runtime
