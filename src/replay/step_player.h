// One step as columns (umem/trace/step_trace.py), played over and over.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "base/status.h"
#include "policy/plan.h"
#include "replay/machine.h"

namespace umem::replay {

using policy::Kind;

// n ops, m tensors.
struct StepColumns {
  std::vector<double> op_us;                                       // [n]
  std::vector<std::int64_t> bytes, kind, first, last, next_alias;  // [m]
  std::vector<residency::Tag> tag;                                 // [m]
  std::vector<residency::Family> family;                           // [m]
  std::vector<std::int64_t> access_start;                          // [n + 1]
  std::vector<std::int64_t> access_tensor;                         // [accesses]
  std::vector<unsigned char> access_write;                         // [accesses]
  // An access is of bytes `begin` to `end` of its tensor, as often as it is named; of all of them
  // where it is not. Ascending by access.
  std::vector<std::int64_t> part_access, part_begin, part_end;
  // Updates on the host: a parameter, by a gradient that is freed once it has left.
  std::vector<std::int64_t> update_parameter, update_gradient;  // [updates] tensors
  std::vector<double> update_us;                                // [updates]
  // The names of ops, by number; no op has one if `op_name` is empty.
  std::vector<std::string> names;
  std::vector<std::int64_t> op_name;  // [n]

  std::size_t ops() const { return op_us.size(); }
  std::size_t tensors() const { return bytes.size(); }
  std::size_t updates() const { return update_us.size(); }
  // kInvalidArgument, with what is wrong, when they are no step.
  Status check() const;
};

class StepPlayer {
 public:
  StepPlayer(Machine& machine, StepColumns columns);

  Status allocate_all();  // what is alive when the step begins
  Status run();           // once
  void release_all();
  void* address(std::size_t tensor) const { return blocks_[tensor]; }
  // [m] Where each tensor was in the last run; null: nowhere.
  const std::vector<void*>& placed() const { return placed_; }
  std::size_t tensors() const { return blocks_.size(); }
  std::uint64_t events() const { return events_; }  // of one run
  // [n] When each op of the last run was over, since the step began.
  const std::vector<double>& op_end_us() const { return op_end_us_; }

 private:
  // Tensors by op: those of op i are ids[start[i]] up to ids[start[i + 1]].
  struct Schedule {
    std::vector<std::uint32_t> start, ids;
    template <class When>
    void fill(std::size_t ops, std::size_t tensors, When when);
  };

  Kind kind(std::size_t tensor) const { return static_cast<Kind>(columns_.kind[tensor]); }
  Status allocate(std::size_t tensor);
  void release(std::size_t tensor);
  // Releases what is not used from op `i` on, and has the host update what is complete by then.
  Status end_before(std::size_t i);
  Status send_gradient(std::size_t tensor);
  void release_arrived(double by_us);
  Status update(std::size_t which);
  Status op(std::size_t i);
  // Calls `act` with each access from `first` to before `last`, and the bytes that it is of.
  template <class Act>
  void each_part(std::size_t first, std::size_t last, Act act) const;

  Machine& machine_;
  const StepColumns columns_;
  Schedule begins_, ends_;  // ends_: released before op i, or after the last one
  std::vector<std::uint32_t>
      opening_;  // CARRIED without a next-step alias: new at the begin of every run
  std::vector<std::uint32_t> closing_;  // MADE that the next step does not know
  std::vector<std::uint32_t> carried_;  // CARRIED that take their next-step alias's block over
  std::vector<void*> blocks_, placed_;
  std::vector<double> op_end_us_;
  Schedule updates_;                          // by the op before which they may begin
  std::vector<std::vector<double>> arrived_;  // [m] of a gradient, when each piece has
  std::vector<std::int64_t> due_;             // [updates] the first op that uses the parameter
  struct Leaving {
    void* block;
    double arrived_us;
  };
  std::deque<Leaving> leaving_;  // gradients, whose memory is used again once they have arrived
  std::uint64_t runs_ = 0;
  std::uint64_t events_ = 0;
};

}  // namespace umem::replay
