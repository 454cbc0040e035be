// A plan in columns: the moves for every step that runs the same ops on the same units. An op here
// is one that uses at least one unit, a large block or a segment; others do not count.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/export.h"
#include "base/status.h"

namespace umem::policy {

using Ints = std::vector<std::int64_t>;

// The lifetime of a tensor relative to the step. The step repeats: its start follows its end.
enum class Kind : std::int64_t {
  kPersistent,  // alive all the time: weights, optimizer states
  kTransient,   // allocated and freed inside the step
  kMade,        // allocated in the step, freed in a later one
  kCarried,     // a made one in the next step, until its free; next_alias names it
};
enum class Order : std::int64_t { kLru, kFifo, kFurthest };

// umem/policies/base.py describes the columns; tensors here are the large ones and segments.
struct Plan {
  std::int64_t n_ops = 0;
  Ints bytes, kind, next_alias;  // [m]
  Ints address;        // [m] of tensors that are live where a step begins, at installation; or 0
  Ints segment;        // [m] 1: a segment of small blocks, which keeps its address in all its lives
  Ints allocations;    // tensors in the order in which a step allocates them
  Ints allocated;      // of each allocation: the op in which, or before which, ascending
  Ints access_start;   // [n_ops + 1]
  Ints access_tensor;  // each tensor once per op
  Ints op;             // [n_ops] number_of the op's name
  Ints evict_after, evict_tensor;
  Ints cold_after, cold_tensor;
  Ints fetch_after, fetch_by, fetch_tensor;
  Ints copy_after, copy_until, copy_tensor;
  Ints keep, waits;
  Ints read_mostly;  // persistent tensors that the step does not write
  Ints cut;          // sizes of blocks whose ranges are cut finer before units are looked up
  Ints occupancy;    // [n_ops] if gated
  std::int64_t gated = 0, capacity = 0;
  std::int64_t order = 0, window = 0, headroom = 0;

  std::int64_t n_tensors() const { return static_cast<std::int64_t>(bytes.size()); }
  // The tensors that an op uses.
  std::span<const std::int64_t> used_by(std::size_t op) const {
    const auto begin = static_cast<std::size_t>(access_start[op]);
    return std::span(access_tensor)
        .subspan(begin, static_cast<std::size_t>(access_start[op + 1]) - begin);
  }
};

// A number for the name of an op, the same in every process.
UMEM_API std::int64_t number_of(std::string_view op);

// A plan for the same steps without moves, which knows what they do not write.
Plan without_moves(const Plan& plan);

// True if the plan asks for a move, now or under pressure.
bool moves_anything(const Plan& plan);

// True if nothing in the plan says what leaves first.
bool leaves_victims_to_lru(const Plan& plan);

// True if both plans are for the same steps.
bool same_step(const Plan& one, const Plan& two);

// kInvalidArgument with the column, its value and the allowed values. A plan that passes may be
// useless, and then costs time; it is safe to follow.
UMEM_API Status check(const Plan& plan);

}  // namespace umem::policy
