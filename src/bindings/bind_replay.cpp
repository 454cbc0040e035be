#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/units.h"
#include "bindings/bind.h"
#include "replay/replay.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

using replay::Replay;
using residency::Family;
using residency::Tag;

// Bad columns are a mistake of the caller's, not of the program's options.
void raise_input_error(const Status& status) {
  if (status.code() == Code::kInvalidArgument) throw py::value_error(status.message());
  raise_if_error(status);
}

template <class Call>
void run_input(Call call) {
  raise_input_error(unlocked(call));
}

// A column of exactly this type, since a silent conversion could cut values off.
template <class Item, class Stored = Item>
std::vector<Stored> column(const py::dict& step, const char* name) {
  if (!step.contains(name)) throw py::value_error(std::string("set_step: no column ") + name);
  const py::object given = step[name];
  if (!py::isinstance<py::array_t<Item>>(given) || py::array(given).ndim() != 1)
    throw py::value_error(std::string("set_step: the column ") + name +
                          " is no one-dimensional numpy array of " +
                          std::string(py::str(py::dtype::of<Item>())));
  const auto values = py::cast<py::array_t<Item>>(given);
  const auto items = values.template unchecked<1>();
  std::vector<Stored> result(static_cast<std::size_t>(items.shape(0)));
  for (py::ssize_t i = 0; i < items.shape(0); ++i)
    result[static_cast<std::size_t>(i)] = static_cast<Stored>(items(i));
  return result;
}

template <class Label, class Find>
std::vector<Label> labels(const py::dict& step, const char* name, Find find) {
  if (!step.contains(name)) throw py::value_error(std::string("set_step: no column ") + name);
  std::vector<Label> result;
  for (const py::handle text : step[name]) result.push_back(find(py::cast<std::string>(text)));
  return result;
}

replay::StepColumns columns_of(const py::dict& step) {
  using Int = std::int64_t;
  replay::StepColumns columns{column<double>(step, "op_us"),
                              column<Int>(step, "bytes"),
                              column<Int>(step, "kind"),
                              column<Int>(step, "first"),
                              column<Int>(step, "last"),
                              column<Int>(step, "next_alias"),
                              labels<Tag>(step, "tag", residency::find_tag),
                              labels<Family>(step, "family", residency::find_family),
                              column<Int>(step, "access_start"),
                              column<Int>(step, "access_tensor"),
                              column<bool, unsigned char>(step, "access_write"),
                              {},
                              {},
                              {},
                              {},
                              {},
                              {},
                              {},
                              {}};
  if (step.contains("part_access")) {
    columns.part_access = column<Int>(step, "part_access");
    columns.part_begin = column<Int>(step, "part_begin");
    columns.part_end = column<Int>(step, "part_end");
  }
  if (step.contains("update_us")) {
    columns.update_parameter = column<Int>(step, "update_parameter");
    columns.update_gradient = column<Int>(step, "update_gradient");
    columns.update_us = column<double>(step, "update_us");
  }
  if (step.contains("op_name")) {
    columns.names = py::cast<std::vector<std::string>>(step["names"]);
    columns.op_name = column<Int>(step, "op_name");
  }
  // A small tensor's size may be rounded up to that of a large one.
  const std::vector<unsigned char> large = column<bool, unsigned char>(step, "large");
  if (large.size() != columns.bytes.size())
    throw py::value_error("set_step: the columns of tensors differ in length");
  for (std::size_t t = 0; t < large.size(); ++t)
    if (!large[t]) columns.bytes[t] = std::min<Int>(columns.bytes[t], kPageBytes - 1);
  return columns;
}

py::dict figures(const Replay& replay) {
  const replay::Figures last = replay.figures();
  const replay::Progress total = replay.progress();
  py::dict result;
  result["step_us"] = last.step_us;
  result["compute_us"] = last.compute_us;
  result["stall_us"] = last.stall_us;
  result["host_us"] = last.host_us;
  result["bytes_in"] = last.bytes_in;
  result["bytes_out"] = last.bytes_out;
  result["bytes_discarded"] = last.bytes_discarded;
  result["faults"] = last.faults;
  result["evictions"] = last.evictions;
  result["prefetches"] = last.prefetches;
  result["prefetched_unused_bytes"] = last.prefetched_unused_bytes;
  result["peak_resident_bytes"] = last.peak_resident_bytes;
  result["peak_host_bytes"] = last.peak_host_bytes;
  result["plan_hits"] = last.plan_hits;
  result["plan_misses"] = last.plan_misses;
  result["steps"] = total.steps;
  result["events"] = total.events;
  result["seconds"] = total.seconds;
  return result;
}

template <class Shown, class Rows, class Part = std::identity>
py::array_t<Shown> column(const Rows& rows, Part part = {}) {
  py::array_t<Shown> result(static_cast<py::ssize_t>(rows.size()));
  std::transform(rows.begin(), rows.end(), result.mutable_data(),
                 [&](const auto& row) { return static_cast<Shown>(std::invoke(part, row)); });
  return result;
}

py::dict moves_of(Replay& replay) {
  Result<soft::Moves> moves = unlocked([&] { return replay.moves(); });
  raise_input_error(moves.take_status());
  const std::vector<soft::Move>& rows = moves.value().rows;
  py::dict result;
  result["base"] = moves.value().base;
  result["issued_us"] = column<double>(rows, &soft::Move::issued_us);
  result["start_us"] = column<double>(rows, &soft::Move::start_us);
  result["end_us"] = column<double>(rows, &soft::Move::end_us);
  result["page"] = column<std::int64_t>(rows, &soft::Move::page);
  result["pages"] = column<std::int64_t>(rows, &soft::Move::pages);
  result["operation"] = column<std::int64_t>(rows, &soft::Move::operation);
  result["kind"] = column<std::int64_t>(rows, &soft::Move::kind);
  result["fault"] = column<bool>(rows, &soft::Move::fault);
  result["unused"] = column<bool>(rows, &soft::Move::unused);
  return result;
}

std::unique_ptr<Replay> open(Options options, bool backed) {
  options.backed = backed;
  return value_of(unlocked([&] { return Replay::open(options); }));
}

}  // namespace

void bind_replay(py::module_& module) {
  py::class_<Replay>(module, "Replay", "A step on the runtime, in virtual time.")
      .def(py::init(&open), py::arg("options"), py::arg("backed") = false)
      .def("set_step",
           [](Replay& self, const py::dict& step) {
             replay::StepColumns columns = columns_of(step);
             run_input([&] { return self.set_step(std::move(columns)); });
           })
      .def("run_step",
           [](Replay& self, std::uint64_t repeats) {
             run_input([&] { return self.run_step(repeats); });
           })
      .def("address",
           [](const Replay& self, std::size_t tensor) {
             Result<std::uintptr_t> found = self.address(tensor);
             raise_input_error(found.take_status());
             return found.value();
           })
      .def("run_logged", [](Replay& self) { run_input([&] { return self.run_logged(); }); })
      .def("moves", &moves_of)
      .def("placed", [](const Replay& self) { return column<std::int64_t>(self.placed()); })
      .def("figures", &figures)
      .def("op_end_us",
           [](const Replay& self) {
             const std::vector<double>& ends = self.op_end_us();
             return py::array_t<double>(static_cast<py::ssize_t>(ends.size()), ends.data());
           })
      .def("close", [](Replay& self) { run_input([&] { return self.close(); }); });
}

}  // namespace umem::bindings
