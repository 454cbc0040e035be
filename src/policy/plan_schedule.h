// The plan's schedule: requests that are due at the cursor's op and not yet done.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "base/range_maximum.h"
#include "policy/plan_cursor.h"

namespace umem::policy {

class PlanSchedule {
 public:
  explicit PlanSchedule(const PlanCursor& cursor);

  // The ops up to the cursor's `next_op` followed the plan, or a step begins; `continues` if the
  // step before followed the plan. The plan's requests at this point are due now.
  void op_ended();
  void step_began(bool continues);

  bool empty() const {
    return evict_.tensors.empty() && fetch_.empty() && in_turn_.empty() && write_back_.empty() &&
           end_write_back_.empty();
  }
  // Some of these may no longer be due.
  std::size_t due_evictions() const { return evict_.tensors.size(); }
  // Appends the units to evict. Units in use stay due. `inner`: the last op was within another.
  void evictions(const CandidateView& view, bool inner, std::vector<RangeId>& out);
  // Appends the units to write back, and those whose write-back ends. Units in use by a collective
  // or an op stay due.
  void write_backs(const CandidateView& view, bool inner, std::vector<RangeId>& begin,
                   std::vector<RangeId>& end);
  // The plan does not act, so the engine takes none of them.
  void drop_write_backs() {
    write_back_.clear();
    end_write_back_.clear();
  }
  // The unit was evicted for lack of room, or slept. If the plan has it on the device, it returns
  // for its next use if it fits: an on-demand fetch would queue behind all earlier requests.
  void evicted(RangeId id);
  // True if the plan fetches the tensor for its next use and has not begun to: until then it needs
  // no room.
  bool returns_later(Tensor tensor) const;
  // The next unit to fetch; kNoRange: none now.
  RangeId next_fetch(const CandidateView& view);
  // True once for each op after which compute waits.
  bool take_wait() { return std::exchange(waits_, false); }
  bool waits() const { return waits_; }

  bool cold(Tensor tensor) const { return marked(cold_mark_, tensor); }
  // Each once; some may no longer be cold.
  const std::vector<Tensor>& cold() const { return cold_.tensors; }

 private:
  // Items of a plan by the op after which they are due; -1 is the step's begin.
  struct OpIndex {
    std::vector<std::size_t> start, item;
    OpIndex(const Ints& after, std::size_t n_ops);
  };
  struct Fetch {
    Tensor tensor;
    std::uint32_t life;  // the tensor's life when this became due; a later life is not affected
    std::int64_t by;
    std::uint64_t turn;
    bool planned = true;  // the plan's occupancy does not include its bytes until it starts
    bool operator>(const Fetch& other) const {
      return by != other.by ? by > other.by : turn > other.turn;
    }
  };

  static std::size_t index(Tensor tensor) { return static_cast<std::size_t>(tensor); }
  // Marks are valid for one life of a tensor: 0, or the life + 1.
  using Marks = std::vector<std::uint32_t>;
  bool marked(const Marks& marks, Tensor tensor) const {
    return marks[index(tensor)] == cursor_.life(tensor) + 1;
  }
  void mark(Marks& marks, Tensor tensor) { marks[index(tensor)] = cursor_.life(tensor) + 1; }
  // Tensors in order, each once: a mark that is cleared and set again removes the first entry.
  struct Queue {
    std::vector<Tensor> tensors;
    std::vector<bool> queued;
    void add(Tensor tensor) {
      if (queued[index(tensor)]) return;
      queued[index(tensor)] = true;
      tensors.push_back(tensor);
    }
    template <class Goes>
    void drop_if(Goes goes) {
      std::erase_if(tensors, [&](Tensor tensor) {
        const bool going = goes(tensor);
        if (going) queued[index(tensor)] = false;
        return going;
      });
    }
  };
  bool stale(const Fetch& fetch) const {
    return cursor_.life(fetch.tensor) != fetch.life || cursor_.unit_of(fetch.tensor) == kNoRange;
  }
  bool left_by_inner(const CandidateView& view, Tensor tensor, RangeId id) const;
  bool gated() const { return cursor_.plan().gated != 0; }
  const Fetch* head() const;
  void drop_head();
  void request_fetch(const Fetch& fetch);
  void add_due(std::size_t point);
  bool admits(const CandidateView& view, const Fetch& fetch) const;
  std::int64_t unplanned_bytes(const CandidateView& view) const;
  void started(const Fetch& fetch);
  void back(const Fetch& fetch);

  const PlanCursor& cursor_;
  const OpIndex evictions_, colds_, fetches_, write_backs_, write_back_ends_;
  std::vector<bool> waits_after_;  // [n_ops + 1]
  Queue evict_, cold_;             // those that are still marked
  Marks evict_mark_, cold_mark_, fetch_mark_;
  std::vector<std::pair<Tensor, std::int64_t>> returns_;  // with the ops of the uses; sorted
  std::vector<std::int64_t> returned_;                    // the use for which it is back; -1: none
  std::priority_queue<Fetch, std::vector<Fetch>, std::greater<>> fetch_;  // gated: by `by`
  std::deque<Fetch> in_turn_;                                             // else
  std::vector<Fetch> ahead_;  // started for the next step
  struct Copy {
    Tensor tensor;
    std::uint32_t life;
  };
  std::vector<Copy> write_back_;  // those that are due
  std::vector<Tensor> end_write_back_;
  // The plan's bytes on the device at each op of this step and of the next one.
  RangeMaximum occupancy_;
  std::int64_t started_bytes_ = 0;  // of fetches that began since the last op
  std::uint64_t turn_ = 0;
  std::size_t done_ = 0;  // ops of this step whose requests are all due
  bool waits_ = false;
};

}  // namespace umem::policy
