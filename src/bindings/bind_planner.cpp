// The planners' loops, on numpy columns of int64 and float64. Indices are copied before they are
// checked, so that a concurrent write to a column cannot make native code read out of bounds.
#include <pybind11/numpy.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "bindings/bind.h"
#include "planner/choice.h"
#include "planner/estimate.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

template <class Item>
using Array = py::array_t<Item, py::array::c_style>;
using Ints = Array<std::int64_t>;
using Floats = Array<double>;

// Sums of at most this many bytes, or places, do not overflow.
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 48;
constexpr std::int64_t kFarthest = std::int64_t{1} << 32;

template <class Item>
std::vector<Item> rows(const char* name, const Array<Item>& column, std::size_t length) {
  if (column.ndim() != 1) throw py::value_error(std::string(name) + " is no column");
  if (static_cast<std::size_t>(column.size()) != length)
    throw py::value_error(std::string(name) + " has " + std::to_string(column.size()) +
                          " rows, and not " + std::to_string(length));
  return {column.data(), column.data() + column.size()};
}

std::vector<std::int64_t> between(const char* name, const Ints& column, std::size_t length,
                                  std::int64_t min, std::int64_t max) {
  auto values = rows(name, column, length);
  for (const std::int64_t value : values)
    if (value < min || max < value)
      throw py::value_error(std::string(name) + " is not from " + std::to_string(min) + " to " +
                            std::to_string(max));
  return values;
}

std::vector<double> numbers(const char* name, const Floats& column, std::size_t length) {
  auto values = rows(name, column, length);
  if (!std::ranges::all_of(values, [](double value) { return std::isfinite(value); }))
    throw py::value_error(std::string(name) + " has what is no number");
  return values;
}

template <class Item>
std::size_t length(const Array<Item>& column) {
  return static_cast<std::size_t>(column.size());
}

template <class Item>
py::array_t<Item> array_of(const std::vector<Item>& values) {
  return py::array_t<Item>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::array_t<std::int64_t> choose(const Ints& begin, const Ints& end, const Ints& wrap,
                                 const Ints& sizes, const Floats& idle_us, const Ints& over,
                                 const Ints& order) {
  const std::size_t gaps = length(begin);
  const auto places = static_cast<std::int64_t>(length(over));
  const auto from = between("begin", begin, gaps, 0, places);
  const auto to = between("end", end, gaps, 0, places);
  const auto around = between("wrap", wrap, gaps, 0, places);
  const auto bytes = between("sizes", sizes, gaps, 0, kMaxBytes);
  const auto idle = numbers("idle_us", idle_us, gaps);
  const auto excess = between("over", over, length(over), -kMaxBytes, kMaxBytes);
  const auto first = between("order", order, length(order), 0, static_cast<std::int64_t>(gaps) - 1);
  const planner::GapPlaces columns{from, to, around, bytes, idle};
  return array_of(unlocked([&] { return planner::choose(columns, excess, first); }));
}

py::tuple return_starts(const Ints& start, const Ints& end, const Ints& sizes,
                        const Ints& occupancy, std::int64_t available) {
  const std::size_t returns = length(start);
  const auto n = static_cast<std::int64_t>(length(occupancy));
  const auto from = between("start", start, returns, -1, 2 * n);
  const auto to = between("end", end, returns, 0, 2 * n);
  const auto bytes = between("sizes", sizes, returns, 0, kMaxBytes);
  const auto taken = between("occupancy", occupancy, length(occupancy), -kMaxBytes, kMaxBytes);
  if (available < -kMaxBytes)
    throw py::value_error("room is not from " + std::to_string(-kMaxBytes));
  const auto found =
      unlocked([&] { return planner::return_starts(from, to, bytes, taken, available); });
  return py::make_tuple(array_of(found.op), array_of(found.taken));
}

py::tuple estimate(const Floats& op_us, const Floats& slack_us, const Ints& start,
                   const Floats& out_us, const Floats& in_us, const Ints& quiet,
                   const Ints& returns, const Ints& return_start, const Ints& return_end,
                   const Floats& room_us, const Ints& written, const Ints& due,
                   const Floats& copy_us, const Ints& parameter, const Ints& gradient,
                   const Floats& work_us, std::int64_t never) {
  const std::size_t n = length(op_us), gaps = length(start), backs = length(returns),
                    times = length(written);
  if (n == 0 && gaps + times > 0)
    throw py::value_error("a step without ops has nothing to leave in");
  const auto us = rows("op_us", op_us, n), slack = rows("slack_us", slack_us, n);
  const auto from = between("start", start, gaps, -kFarthest, kFarthest);
  const auto out = rows("out_us", out_us, gaps), in = rows("in_us", in_us, gaps);
  const auto of_gap = between("quiet", quiet, gaps, -1, static_cast<std::int64_t>(times) - 1);
  const auto gap = between("returns", returns, backs, 0, static_cast<std::int64_t>(gaps) - 1);
  const auto back_from = between("return_start", return_start, backs, -kFarthest, kFarthest);
  const auto back_by = between("return_end", return_end, backs, -kFarthest, kFarthest);
  const auto room = rows("room_us", room_us, backs);
  const auto last_write = between("written", written, times, -kFarthest, kFarthest);
  const auto first_way_out = between("due", due, times, -kFarthest, kFarthest);
  const auto copy = rows("copy_us", copy_us, times);
  const std::size_t updated = length(work_us);
  const auto last_gap = static_cast<std::int64_t>(gaps) - 1;
  const auto of_parameter = between("parameter", parameter, updated, 0, last_gap);
  const auto of_gradient = between("gradient", gradient, updated, 0, last_gap);
  const auto work = numbers("work_us", work_us, updated);
  const planner::HostUpdates updates{of_parameter, of_gradient, work};
  const planner::Ops ops{us, slack};
  const planner::AwayGaps away{from, out, in, of_gap};
  const planner::Returns back{gap, back_from, back_by, room};
  const planner::QuietTimes quiet_times{last_write, first_way_out, copy};
  const auto found =
      unlocked([&] { return planner::estimate(ops, away, back, quiet_times, updates, never); });
  return py::make_tuple(found.us, array_of(found.copied));
}

}  // namespace

void bind_planner(py::module_& module) {
  module.def("choose_gaps", &choose, py::arg("begin"), py::arg("end"), py::arg("wrap"),
             py::arg("sizes"), py::arg("idle_us"), py::arg("over"), py::arg("order"));
  module.def("return_starts", &return_starts, py::arg("start"), py::arg("end"), py::arg("sizes"),
             py::arg("occupancy"), py::arg("room"));
  module.def("step_estimate", &estimate, py::arg("op_us"), py::arg("slack_us"), py::kw_only(),
             py::arg("start"), py::arg("out_us"), py::arg("in_us"), py::arg("quiet"),
             py::arg("returns"), py::arg("return_start"), py::arg("return_end"), py::arg("room_us"),
             py::arg("written"), py::arg("due"), py::arg("copy_us"), py::arg("parameter"),
             py::arg("gradient"), py::arg("work_us"), py::arg("never"));
}

}  // namespace umem::bindings
