// The planners' loops on random columns, for the sanitizers; tests/unit/test_planning_loops.py
// compares their answers with plain loops.
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "expect.h"
#include "planner/choice.h"
#include "planner/estimate.h"

namespace {

using namespace umem;  // NOLINT: a test program
using Ints = std::vector<std::int64_t>;
using Floats = std::vector<double>;

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  std::int64_t from(std::int64_t min, std::int64_t max) {
    return std::uniform_int_distribution<std::int64_t>(min, max)(engine_);
  }
  Ints column(std::size_t rows, std::int64_t min, std::int64_t max) {
    Ints values(rows);
    for (std::int64_t& value : values) value = from(min, max);
    return values;
  }
  Floats times(std::size_t rows) {
    const Ints values = column(rows, 0, 9);
    return {values.begin(), values.end()};
  }
  Ints order(std::size_t rows) {
    Ints values(rows);
    for (std::size_t row = 0; row < rows; ++row) values[row] = static_cast<std::int64_t>(row);
    std::ranges::shuffle(values, engine_);
    return values;
  }

 private:
  std::mt19937 engine_;
};

void choose(Random& random) {
  const std::int64_t places = random.from(0, 20);
  const auto gaps = static_cast<std::size_t>(random.from(0, 30));
  Ints begin = random.column(gaps, 0, places), end = random.column(gaps, 0, places);
  for (std::size_t gap = 0; gap < gaps; ++gap)
    if (begin[gap] > end[gap]) std::swap(begin[gap], end[gap]);
  Ints wrap;
  for (const std::int64_t first : begin) wrap.push_back(random.from(0, first));
  const Ints bytes = random.column(gaps, 1, 5), order = random.order(gaps);
  const Floats idle_us = random.times(gaps);
  const Ints over = random.column(static_cast<std::size_t>(places), 1, 30);
  const Ints left = planner::choose({begin, end, wrap, bytes, idle_us}, over, order);
  EXPECT(left.size() <= gaps);
  Ints now = over;
  for (const std::int64_t gap : left)
    for (std::int64_t place = 0; place < places; ++place) {
      const auto i = static_cast<std::size_t>(gap);
      if (place < wrap[i] || (begin[i] <= place && place < end[i]))
        now[static_cast<std::size_t>(place)] -= bytes[i];
    }
  for (std::size_t gap = 0; gap < gaps; ++gap) {  // keeping it helps no op over the capacity
    if (std::ranges::count(left, static_cast<std::int64_t>(gap)) > 0) continue;
    for (std::int64_t place = 0; place < places; ++place)
      if (place < wrap[gap] || (begin[gap] <= place && place < end[gap]))
        EXPECT(now[static_cast<std::size_t>(place)] <= 0);
  }
}

void estimate(Random& random) {
  const std::int64_t n = random.from(1, 20);
  const auto rows = static_cast<std::size_t>(n);
  const auto gaps = static_cast<std::size_t>(random.from(0, 20));
  const auto times = static_cast<std::size_t>(random.from(0, 10));
  const Ints start = random.column(gaps, -1, n - 1), bytes = random.column(gaps, 1, 9);
  Ints end;
  for (const std::int64_t from : start) end.push_back(from + random.from(2, n + 1));
  const Ints occupancy = random.column(rows, 0, 20);
  const std::int64_t available = *std::ranges::max_element(occupancy) + random.from(0, 20);
  const auto found = planner::return_starts(start, end, bytes, occupancy, available);
  for (std::size_t gap = 0; gap < gaps; ++gap)
    EXPECT(start[gap] < found.op[gap] && found.op[gap] <= end[gap]);
  for (const std::int64_t taken : found.taken) EXPECT(taken <= available);
  const Floats us = random.times(rows), slack = random.times(rows);
  const Floats out = random.times(gaps), in = random.times(gaps), copy = random.times(times);
  const Floats room = random.times(gaps);
  const Ints quiet = random.column(gaps, -1, static_cast<std::int64_t>(times) - 1);
  const Ints written = random.column(times, -2 * n, n - 1), due = random.column(times, -n, n);
  const planner::Ops ops{us, slack};
  const planner::AwayGaps away{start, out, in, quiet};
  const Ints all = random.order(gaps);
  Ints back_start, back_end;
  for (const std::int64_t gap : all) {
    back_start.push_back(found.op[static_cast<std::size_t>(gap)]);
    back_end.push_back(end[static_cast<std::size_t>(gap)]);
  }
  const std::size_t updated = gaps > 0 ? static_cast<std::size_t>(random.from(0, 4)) : 0;
  const auto last = static_cast<std::int64_t>(gaps) - 1;
  const Ints parameter = random.column(updated, 0, last),
             gradient = random.column(updated, 0, last);
  const Floats work = random.times(updated);
  const planner::Returns back{all, back_start, back_end, room};
  const auto step = planner::estimate(ops, away, back, {written, due, copy},
                                      {parameter, gradient, work}, 1 << 30);
  double min = 0;
  for (const double op : us) min += op;
  EXPECT(step.us >= min);
  EXPECT(step.copied.size() == times);
}

}  // namespace

int main() {
  Random random(1);
  for (int round = 0; round < 2000; ++round) {
    choose(random);
    estimate(random);
  }
  return g_wrong == 0 ? 0 : 1;
}
