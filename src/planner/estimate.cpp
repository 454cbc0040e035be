#include "planner/estimate.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <queue>
#include <tuple>
#include <utility>

#include "base/host_lane.h"
#include "base/range_maximum.h"

namespace umem::planner {
namespace {

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

std::int64_t floor_divide(std::int64_t value, std::int64_t by) {
  return value / by - (value % by < 0 ? 1 : 0);
}

std::int64_t within(std::int64_t op, std::int64_t n) {
  return op - floor_divide(op, n) * n;
}

// Rows grouped by op; rows of the same op keep the given order.
class ByOp {
 public:
  template <class OpOf>
  ByOp(std::int64_t n, std::size_t rows, OpOf op_of) : begin_(index(n) + 1), row_(rows) {
    for (std::size_t row = 0; row < rows; ++row) ++begin_[index(within(op_of(row), n))];
    std::size_t sum = 0;
    for (std::size_t& begin : begin_) begin = std::exchange(sum, sum + begin);
    std::vector<std::size_t> next(begin_);
    for (std::size_t row = 0; row < rows; ++row) row_[next[index(within(op_of(row), n))]++] = row;
  }
  std::span<const std::size_t> operator[](std::int64_t op) const {
    return std::span(row_).subspan(begin_[index(op)], begin_[index(op) + 1] - begin_[index(op)]);
  }

 private:
  std::vector<std::size_t> begin_, row_;
};

template <class Item>
using Earliest = std::priority_queue<Item, std::vector<Item>, std::greater<>>;

// The copies on the host that are valid as time passes, and the next ones that the idle link makes.
// Ops count from the begin of the first of several equal steps.
class WriteBacks {
 public:
  WriteBacks(const QuietTimes& quiet, std::int64_t n, std::int64_t never)
      : quiet_(quiet),
        n_(n),
        enter_(n, quiet.written.size(), [&](std::size_t i) { return quiet.written[i] + 1; }),
        of_step_(quiet.written.size(), -1),
        done_(quiet.written.size()),
        started_(quiet.written.size(), never) {
    for (std::size_t i = 0; i < quiet.written.size(); ++i)
      if (quiet.written[i] < -1) wait(i, 0);
  }

  // The completion time of the copy that lets a tensor leave without a transfer after an op, if
  // there is one.
  std::optional<double> ready(std::int64_t which, std::int64_t op) const {
    if (which < 0 || of_step_[index(which)] != step(index(which), op)) return std::nullopt;
    return done_[index(which)];
  }
  // It left after an op by a transfer that ended at this time: the host has a copy from then on.
  void moved(std::int64_t which, std::int64_t op, double when) {
    if (which < 0) return;
    of_step_[index(which)] = step(index(which), op);
    done_[index(which)] = when;
  }
  // In an op that ends at `end`, the link is idle after `free`: starts copies while it is.
  // Returns the time at which the link is idle again.
  double fill(std::int64_t op, double free, double end) {
    for (const std::size_t which : enter_[within(op, n_)]) wait(which, step(which, op - 1));
    while (!waiting_.empty() && free < end) {
      const auto [due, which, step] = waiting_.top();
      waiting_.pop();
      if (due < op || of_step_[which] == step) continue;
      free += quiet_.out_us[which];
      of_step_[which] = step;
      done_[which] = free;
      started_[which] = op - step * n_;
    }
    return free;
  }
  std::vector<std::int64_t> started() && { return std::move(started_); }

 private:
  std::int64_t step(std::size_t which, std::int64_t op) const {
    return floor_divide(op - quiet_.written[which], n_);
  }
  void wait(std::size_t which, std::int64_t step) {
    const std::int64_t due = quiet_.due[which];
    // Otherwise it leaves as soon as it has been written.
    if (due > quiet_.written[which]) waiting_.emplace(due + step * n_, which, step);
  }

  const QuietTimes& quiet_;
  std::int64_t n_;
  ByOp enter_;
  std::vector<std::int64_t> of_step_;  // step in which the copy's quiet time ends
  std::vector<double> done_;
  std::vector<std::int64_t> started_;
  Earliest<std::tuple<std::int64_t, std::size_t, std::int64_t>> waiting_;  // due, which, step
};

// The host's work on tensors that have left, in the current step.
class Work {
 public:
  Work(const HostUpdates& updates, std::size_t gaps, const std::vector<double>& departure,
       const Returns& returns)
      : updates_(updates),
        departure_(departure),
        left_(updates.us.size()),
        of_gap_(gaps, kNone),
        number_(updates.us.size(), kNone),
        due_(updates.us.size()),
        of_gradient_(gaps) {
    for (std::size_t k = 0; k < updates.us.size(); ++k) {
      of_gap_[index(updates.parameter[k])] = k;
      of_gradient_[index(updates.gradient[k])].push_back(k);
    }
    for (std::size_t row = 0; row < returns.gap.size(); ++row)
      if (const std::size_t k = of_gap_[index(returns.gap[row])]; k != kNone)
        due_[k] = static_cast<double>(returns.end[row]);
  }

  // For the step that begins at op `begin`.
  void left(std::size_t gap, std::int64_t begin) {
    if (of_gap_[gap] != kNone) left(of_gap_[gap], 1, begin);
    for (const std::size_t k : of_gradient_[gap]) left(k, 2, begin);
  }
  // The earliest return of a tensor that left in this gap.
  double ready(std::size_t gap) {
    const std::size_t k = of_gap_[gap];
    if (k == kNone || number_[k] == kNone) return departure_[gap];
    return std::max(departure_[gap], lane_.end_of(number_[k]));
  }

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  void left(std::size_t k, unsigned which, std::int64_t begin) {
    left_[k] |= which;
    if (left_[k] != 3) return;
    left_[k] = 0;
    const double ready =
        std::max(departure_[index(updates_.parameter[k])], departure_[index(updates_.gradient[k])]);
    number_[k] = lane_.add(ready, updates_.us[k], due_[k] + static_cast<double>(begin));
  }

  const HostUpdates& updates_;
  const std::vector<double>& departure_;
  std::vector<unsigned> left_;  // 1: the parameter, 2: the gradient
  std::vector<std::size_t> of_gap_, number_;
  std::vector<double> due_;
  std::vector<std::vector<std::size_t>> of_gradient_;
  HostLane lane_;
};

}  // namespace

ReturnStarts return_starts(Ints start, Ints end, Ints bytes, Ints occupancy,
                           std::int64_t available) {
  const auto n = static_cast<std::int64_t>(occupancy.size());
  RangeMaximum taken(occupancy, 3);
  std::vector<std::int64_t> ready(start.size());
  struct Turn {
    std::int64_t op;  // `leaving`: op of its last use; `waiting`: op of the use that it is due for
    std::size_t row;
    std::int64_t lap;
    auto operator<=>(const Turn&) const = default;
  };
  std::vector<Turn> leaving;
  for (const std::int64_t lap : {0, 1})
    for (std::size_t row = 0; row < start.size(); ++row)
      leaving.push_back({start[row] + 1 + lap * n, row, lap});
  std::ranges::sort(leaving);
  Earliest<Turn> waiting;
  std::int64_t point = 0;
  for (auto next = leaving.begin(); !waiting.empty() || next != leaving.end();) {
    if (waiting.empty()) point = std::max(point, next->op);
    for (; next != leaving.end() && next->op <= point; ++next)
      waiting.push({end[next->row] + next->lap * n, next->row, next->lap});
    const auto [due, row, lap] = waiting.top();
    if (point < due) {
      if (const auto full = taken.last_above(index(point), index(due), available - bytes[row])) {
        // It waits for room until its use, unless one that is due earlier leaves.
        point = static_cast<std::int64_t>(*full) + 1;
        if (next != leaving.end()) point = std::min(point, next->op);
        continue;
      }
    }
    waiting.pop();
    const std::int64_t begin = std::min(point, due);
    taken.add(index(begin), index(due), bytes[row]);
    // Returns that are due in the step after the departure compete with that step's own returns;
    // the second lap has those, and the third does not.
    if (lap == (end[row] < n ? 1 : 0)) ready[row] = begin - lap * n;
  }
  ReturnStarts result{std::move(ready), std::vector<std::int64_t>(occupancy.size())};
  for (std::size_t op = 0; op < occupancy.size(); ++op)
    result.taken[op] = taken.at(occupancy.size() + op);
  return result;
}

Estimate estimate(const Ops& ops, const AwayGaps& away, const Returns& returns,
                  const QuietTimes& quiet, const HostUpdates& updates, std::int64_t never) {
  const auto n = static_cast<std::int64_t>(ops.us.size());
  const ByOp leaves(n, away.start.size(), [&](std::size_t gap) { return away.start[gap] + 1; });
  const ByOp starts(n, returns.gap.size(), [&](std::size_t row) { return returns.start[row]; });
  const ByOp needs(n, returns.gap.size(), [&](std::size_t row) { return returns.end[row]; });
  WriteBacks write_backs(quiet, n, never);
  std::vector<double> departure(away.start.size()), arrival(away.start.size());
  Work work(updates, away.start.size(), departure, returns);
  double now = 0, out_free = 0, in_free = 0, begin = 0, left = 0;
  for (std::int64_t point = 0; point < 2 * n; ++point) {
    const std::int64_t op = point % n;
    const double slack = ops.slack_us[index(op)], us = ops.us[index(op)];
    const double ended = now;  // the op before
    if (op == 0) begin = now;
    for (const std::size_t gap : leaves[op]) {
      if (const auto copied = write_backs.ready(away.quiet[gap], point - 1)) {
        departure[gap] = std::max(now, *copied);
      } else {
        left = out_free = departure[gap] = std::max(out_free, now) + away.out_us[gap];
        write_backs.moved(away.quiet[gap], point - 1, left);
      }
      work.left(gap, point - op);
    }
    // A return waits until enough bytes have left for it and for those that start before it.
    double later_us = 0;
    for (const std::size_t row : starts[op]) later_us += returns.room_us[row];
    for (const std::size_t row : starts[op]) {
      const std::size_t gap = index(returns.gap[row]);
      later_us -= returns.room_us[row];
      const double empty = std::max(now, left - slack - later_us);
      in_free = arrival[gap] = std::max({in_free, work.ready(gap), empty}) + away.in_us[gap];
    }
    for (const std::size_t row : needs[op]) now = std::max(now, arrival[index(returns.gap[row])]);
    now = std::max(now, left - slack);
    out_free = write_backs.fill(point, std::max(out_free, ended), now + us);
    now += us;
  }
  return {now - begin, std::move(write_backs).started()};
}

}  // namespace umem::planner
