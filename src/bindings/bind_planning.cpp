// The planners' loops, on numpy columns of int64 and float64. A place that is not in its column is
// a ValueError: no column may make native code read beyond another.
#include <pybind11/numpy.h>

#include <algorithm>
#include <string>

#include "bindings/bind.h"
#include "planning/choice.h"
#include "planning/estimate.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

using Ints = py::array_t<std::int64_t, py::array::c_style>;
using Floats = py::array_t<double, py::array::c_style>;

template <class Item>
std::span<const Item> rows(const py::array_t<Item, py::array::c_style>& column) {
  if (column.ndim() != 1) throw py::value_error("a column has one dimension");
  return {column.data(), static_cast<std::size_t>(column.size())};
}

template <class... Columns>
void check_lengths(const char* what, std::size_t length, const Columns&... columns) {
  if (((static_cast<std::size_t>(columns.size()) != length) || ...))
    throw py::value_error(std::string("the columns of ") + what + " differ in length");
}

void check_within(const char* name, const Ints& column, std::int64_t least, std::int64_t most) {
  const auto values = rows(column);
  if (!std::ranges::all_of(values, [&](auto value) { return least <= value && value <= most; }))
    throw py::value_error(std::string(name) + " is not from " + std::to_string(least) + " to " +
                          std::to_string(most));
}

template <class Item>
py::array_t<Item> array(const std::vector<Item>& values) {
  return py::array_t<Item>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::array_t<std::int64_t> choose(const Ints& begin, const Ints& end, const Ints& wrap,
                                 const Ints& sizes, const Floats& idle_us, const Ints& over,
                                 const Ints& order) {
  const auto gaps = rows(begin).size();
  check_lengths("gaps", gaps, end, wrap, sizes, idle_us);
  check_within("begin", begin, 0, over.size());
  check_within("end", end, 0, over.size());
  check_within("wrap", wrap, 0, over.size());
  check_within("order", order, 0, begin.size() - 1);
  const planning::GapPlaces places{rows(begin), rows(end), rows(wrap), rows(sizes), rows(idle_us)};
  const auto column = rows(over), first = rows(order);
  return array(unlocked([&] { return planning::choose(places, column, first); }));
}

py::tuple return_starts(const Ints& start, const Ints& end, const Ints& sizes,
                        const Ints& occupancy, std::int64_t room) {
  check_lengths("returns", rows(start).size(), end, sizes);
  check_within("start", start, -1, occupancy.size() - 1);
  check_within("end", end, 0, 2 * occupancy.size());
  const auto from = rows(start), to = rows(end), size = rows(sizes), taken = rows(occupancy);
  const auto found = unlocked([&] { return planning::return_starts(from, to, size, taken, room); });
  return py::make_tuple(array(found.op), array(found.taken));
}

py::tuple estimate(const Floats& op_us, const Floats& slack_us, const Ints& start,
                   const Floats& out_us, const Floats& in_us, const Ints& quiet,
                   const Ints& returns, const Ints& return_start, const Ints& return_end,
                   const Ints& written, const Ints& due, const Floats& copy_us,
                   std::int64_t never) {
  check_lengths("ops", rows(op_us).size(), slack_us);
  check_lengths("gaps", rows(start).size(), out_us, in_us, quiet);
  check_lengths("returns", rows(returns).size(), return_start, return_end);
  check_lengths("quiet times", rows(written).size(), due, copy_us);
  check_within("quiet", quiet, -1, written.size() - 1);
  check_within("returns", returns, 0, start.size() - 1);
  if (op_us.size() == 0 && start.size() + written.size() > 0)
    throw py::value_error("a step without ops has nothing to leave in");
  const planning::Ops ops{rows(op_us), rows(slack_us)};
  const planning::AwayGaps away{rows(start), rows(out_us), rows(in_us), rows(quiet)};
  const planning::Returns back{rows(returns), rows(return_start), rows(return_end)};
  const planning::QuietTimes times{rows(written), rows(due), rows(copy_us)};
  const auto found = unlocked([&] { return planning::estimate(ops, away, back, times, never); });
  return py::make_tuple(found.us, array(found.copied));
}

}  // namespace

void bind_planning(py::module_& module) {
  module.def("choose_gaps", &choose, py::arg("begin"), py::arg("end"), py::arg("wrap"),
             py::arg("sizes"), py::arg("idle_us"), py::arg("over"), py::arg("order"));
  module.def("return_starts", &return_starts, py::arg("start"), py::arg("end"), py::arg("sizes"),
             py::arg("occupancy"), py::arg("room"));
  module.def("step_estimate", &estimate, py::arg("op_us"), py::arg("slack_us"), py::kw_only(),
             py::arg("start"), py::arg("out_us"), py::arg("in_us"), py::arg("quiet"),
             py::arg("returns"), py::arg("return_start"), py::arg("return_end"), py::arg("written"),
             py::arg("due"), py::arg("copy_us"), py::arg("never"));
}

}  // namespace umem::bindings
