// Everything that the runtime joins, behind one lock. One object, never destroyed.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "arena/arena.h"
#include "backing/range_table.h"
#include "base/options.h"
#include "driver/table.h"
#include "residency/engine.h"
#include "runtime/runtime.h"

namespace umem::runtime {

struct State {
  std::mutex mutex;
  std::atomic<bool> accepting{false};  // hands out memory and observes
  driver::Driver driver;
  backing::RangeTable ranges{driver.table};
  Options options;
  std::optional<arena::Arena> arena;        // both are there from the first start until a stop that
  std::optional<residency::Engine> engine;  // found no live block
  Stats counts;                     // allocs, frees, ooms, steps; the rest is read when asked
  std::size_t peak_live_bytes = 0;  // since the last reset
  std::size_t most_live_bytes = 0;  // since the start: what the cache may hold
  bool warned_larger_than_budget = false;

  bool open() const { return engine.has_value(); }
};

// Inline, and without a guard once made: every op asks.
extern constinit State* g_state;
State& make_state();
inline State& state() {
  State* made = __atomic_load_n(&g_state, __ATOMIC_ACQUIRE);
  return made ? *made : make_state();
}

// With the lock held.
Result<void*> allocate_locked(State& s, std::size_t bytes, cu::CUstream stream, Op* op);
void retire_reclaimed(State& s);
Status trim_locked(State& s, std::size_t keep_bytes);
Status out_of_memory(const State& s, Code code, std::size_t bytes, const std::string& why);
void pin(Op& op, backing::RangeId id);

}  // namespace umem::runtime
