// A program's position in a plan: its current op, and the unit of each tensor. If the program
// deviates, the cursor is lost until an op looks like one that is still to come; if its small
// blocks are at other places, for the rest of the step.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/assert.h"
#include "policy/op_shapes.h"
#include "policy/plan.h"
#include "residency/view.h"

namespace umem::policy {

using residency::CandidateView;
using residency::kNoRange;
using residency::OpUse;
using residency::RangeId;

inline constexpr Tensor kNoTensor = -1;
// An op compared to the plan.
enum class Followed : unsigned char { kNone, kHit, kMiss };  // kNone: an op that plans do not count

inline constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

class PlanCursor {
 public:
  // `units`: the unit of each tensor that is live where a step begins, and of each segment;
  // kNoRange: unknown. A step begins.
  PlanCursor(Plan plan, const std::vector<RangeId>& units);

  void admitted(RangeId id, std::size_t bytes);
  void segment_admitted(RangeId id);
  // The range is gone: its id may be reused for another one.
  void forgotten(RangeId id);
  void retired(RangeId id);
  // `search`: look for the program's place if it is lost.
  Followed op_ended(const CandidateView& view, const OpUse& op, bool search = true);
  // The unit of each tensor, as the constructor takes them.
  std::vector<RangeId> units() const;
  // True if the whole step matched the plan.
  bool step_ended();

  const Plan& plan() const { return plan_; }
  bool lost() const { return lost_; }
  // The number of times in this step that the program was found again, or used other tensors for an
  // op.
  std::size_t detours() const { return detours_; }
  // The number of allocations in this step whose size differs from the plan's.
  std::size_t resized() const { return resized_; }
  // How far small blocks are at other places than in the plan, in quarters of what it bears.
  std::size_t misplaced() const { return misplaced_bytes_ / (max_misplaced_bytes_ / 4 + 1); }
  // True if the plan has segments of small blocks, which have ops of their own.
  bool has_segments() const { return !home_of_.empty(); }
  // The number of ops since the last one that matched.
  std::size_t strays() const { return strays_; }
  std::size_t next_op() const { return next_op_; }
  std::size_t n_ops() const { return static_cast<std::size_t>(plan_.n_ops); }
  RangeId unit_of(Tensor tensor) const { return unit_of_[index(tensor)]; }
  Tensor tensor_of(RangeId id) const { return id < tensor_of_.size() ? tensor_of_[id] : kNoTensor; }
  // The op that uses it next; at n_ops and more, an op of the next step; kNever.
  std::int64_t next_use(Tensor tensor) const;
  // True if one of this many last ops used it.
  bool used_lately(Tensor tensor, std::uint64_t ops = 1) const {
    return seen_[index(tensor)] > 0 && seen_[index(tensor)] + ops > ops_;
  }
  // The number of times that the tensor was allocated or freed.
  std::uint32_t life(Tensor tensor) const { return life_[index(tensor)]; }

 private:
  std::size_t index(Tensor tensor) const {
    UMEM_ASSERT(tensor >= 0 && tensor < plan_.n_tensors(), "the tensor is one of the plan");
    return static_cast<std::size_t>(tensor);
  }
  void bind(Tensor tensor, RangeId id);
  void unbind(Tensor tensor);
  void count_misplaced(const CandidateView& view, const OpUse& used, std::size_t op);
  bool too_misplaced() const;
  void lose();
  void restart();
  Followed find_again(const CandidateView& view, const OpUse& used);
  void go_on_at(const CandidateView& view, std::size_t op, std::vector<RangeId>& others);
  bool is_persistent(Tensor tensor) const {
    return static_cast<Kind>(plan_.kind[index(tensor)]) == Kind::kPersistent;
  }
  bool is_allocated(RangeId id) const;
  bool adopt(const CandidateView& view, RangeId id, std::size_t op);
  bool is_segment(Tensor tensor) const { return plan_.segment[index(tensor)] != 0; }
  bool on_segments(std::size_t op) const { return signature_[op] == 0; }
  std::size_t next_large_op() const;
  std::size_t next_like(std::int64_t name) const;
  void pass_op();
  bool at_end() const;
  void index_uses();

  struct Block {
    RangeId id = kNoRange;
    std::size_t bytes = 0;
  };

  const Plan plan_;
  const OpShapes shapes_;
  // State of the plan: a hash of each op's large tensors that does not depend on their order, the
  // uses of each tensor, and the tensors that carry on in the next step.
  std::vector<std::uint64_t> signature_;
  std::vector<std::size_t> use_start_;
  std::vector<std::uint32_t> use_op_;
  std::vector<std::int64_t> first_use_, next_step_use_;
  // The op that the tensor's uses count from. As far as umem can see, an op uses what it allocates;
  // in the plan the first use may be in a later op, or never, as with scratch memory.
  std::vector<std::int64_t> counts_from_;
  // State of the program.
  std::vector<RangeId> unit_of_;
  std::vector<Tensor> tensor_of_;
  std::vector<Tensor> home_of_;  // by id: the segment's tensor when it is allocated
  std::vector<std::uint32_t> life_;
  std::vector<std::size_t> next_use_;  // index into use_op_
  std::vector<std::uint64_t> seen_;    // op count at its last use
  std::vector<Tensor> adopted_;
  std::vector<Block> allocated_;  // since the last op, in order; kNoRange: freed again
  std::uint64_t ops_ = 0;
  std::uint64_t last_shape_ = 0;  // shape of the program's last op on large tensors; 0: unknown
  std::size_t next_op_ = 0, next_allocation_ = 0, strays_ = 0, detours_ = 0, resized_ = 0;
  // Bytes that this step's ops brought in of segments that the plan has for other ops, and how many
  // they may be.
  std::size_t misplaced_bytes_ = 0, max_misplaced_bytes_ = 0;
  std::uint64_t since_ = 0;  // the ledger's clock at the end of the last op that matched
  bool lost_ = false;
};

}  // namespace umem::policy
