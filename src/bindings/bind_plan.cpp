// Plans come in columns: numpy arrays of int64, and whole numbers.
#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "bindings/bind.h"
#include "runtime/plans.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

struct Column {
  const char* name;
  policy::Ints policy::Plan::* values;
};
constexpr Column kColumns[] = {
    {"bytes", &policy::Plan::bytes},
    {"kind", &policy::Plan::kind},
    {"next_alias", &policy::Plan::next_alias},
    {"address", &policy::Plan::address},
    {"segment", &policy::Plan::segment},
    {"allocations", &policy::Plan::allocations},
    {"allocated", &policy::Plan::allocated},
    {"access_start", &policy::Plan::access_start},
    {"access_tensor", &policy::Plan::access_tensor},
    {"op", &policy::Plan::op},
    {"evict_after", &policy::Plan::evict_after},
    {"evict_tensor", &policy::Plan::evict_tensor},
    {"cold_after", &policy::Plan::cold_after},
    {"cold_tensor", &policy::Plan::cold_tensor},
    {"fetch_after", &policy::Plan::fetch_after},
    {"fetch_by", &policy::Plan::fetch_by},
    {"fetch_tensor", &policy::Plan::fetch_tensor},
    {"copy_after", &policy::Plan::copy_after},
    {"copy_until", &policy::Plan::copy_until},
    {"copy_tensor", &policy::Plan::copy_tensor},
    {"keep", &policy::Plan::keep},
    {"waits", &policy::Plan::waits},
    {"read_mostly", &policy::Plan::read_mostly},
    {"cut", &policy::Plan::cut},
    {"occupancy", &policy::Plan::occupancy},
};
struct Number {
  const char* name;
  std::int64_t policy::Plan::* value;
};
constexpr Number kNumbers[] = {
    {"n_ops", &policy::Plan::n_ops},       {"gated", &policy::Plan::gated},
    {"capacity", &policy::Plan::capacity}, {"order", &policy::Plan::order},
    {"window", &policy::Plan::window},     {"headroom", &policy::Plan::headroom},
};

[[noreturn]] void refuse(const std::string& name, const char* why) {
  raise_if_error(Status(Code::kInvalidArgument, "plan column '" + name + "' " + why));
  throw py::value_error();  // not reached
}

policy::Ints column_of(const std::string& name, const py::handle& value) {
  if (!py::isinstance<py::array_t<std::int64_t>>(value))
    refuse(name, "is not a numpy array of int64");
  const auto array = py::array_t<std::int64_t, py::array::c_style>::ensure(value);
  if (!array || array.ndim() != 1) refuse(name, "is not a numpy array of one dimension");
  return {array.data(), array.data() + array.size()};
}

std::int64_t number_of(const std::string& name, const py::handle& value) {
  int overflow = 0;
  if (!PyLong_Check(value.ptr())) refuse(name, "is not a whole number");
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow != 0) refuse(name, "is beyond 64 bits");
  return number;
}

policy::Plan plan_of(const py::dict& columns) {
  policy::Plan plan;
  std::size_t found = 0;
  const auto take = [&](const char* name, auto act) {
    if (!columns.contains(name)) refuse(name, "is missing");
    act(columns[name]);
    ++found;
  };
  for (const Column& column : kColumns)
    take(column.name,
         [&](const py::handle& v) { plan.*column.values = column_of(column.name, v); });
  for (const Number& number : kNumbers)
    take(number.name, [&](const py::handle& v) { plan.*number.value = number_of(number.name, v); });
  if (found == columns.size()) return plan;
  for (const auto& item : columns) {
    const std::string name = py::str(item.first);
    const auto same = [&](const auto& known) { return name == known.name; };
    if (std::none_of(std::begin(kColumns), std::end(kColumns), same) &&
        std::none_of(std::begin(kNumbers), std::end(kNumbers), same))
      refuse(name, "is not known");
  }
  return plan;
}

std::uint64_t install(const py::dict& columns, int device) {
  policy::Plan plan = plan_of(columns);
  return value_of(unlocked([&] { return runtime::install_plan(std::move(plan), device); }));
}

py::dict status(int device) {
  const policy::PlanStatus now = value_of(unlocked([&] { return runtime::plan_status(device); }));
  py::dict result;
  result["plans"] = py::cast(now.plans);
  result["active"] = now.active;
  result["complete"] = now.complete;
  result["hits"] = now.hits;
  result["misses"] = now.misses;
  return result;
}

std::size_t room_ahead(int device) {
  return value_of(unlocked([&] { return runtime::room_ahead(device); }));
}

void clear(int device) {
  run([=] { return runtime::clear_plans(device); });
}

void replace(std::uint64_t number, const py::dict& columns, int device) {
  policy::Plan plan = plan_of(columns);
  run([&] { return runtime::replace_plan(number, std::move(plan), device); });
}

void roll_back(std::uint64_t number, int device) {
  run([=] { return runtime::roll_back_plan(number, device); });
}

}  // namespace

void bind_plan(py::module_& module) {
  py::native_enum<policy::Kind>(module, "Kind", "enum.IntEnum")
      .value("PERSISTENT", policy::Kind::kPersistent)
      .value("TRANSIENT", policy::Kind::kTransient)
      .value("MADE", policy::Kind::kMade)
      .value("CARRIED", policy::Kind::kCarried)
      .finalize();
  module.def("install_plan", &install, py::arg("columns"), py::arg("device") = 0);
  module.def("cut_sizes", &runtime::cut_sizes);
  module.def("range_bytes", &runtime::range_bytes, py::arg("block"));
  module.def("finer_piece", &runtime::finer_piece, py::arg("block"));
  module.def("number_of_op", &policy::number_of, py::arg("name"));
  module.def("clear_plans", &clear, py::arg("device") = 0);
  module.def("replace_plan", &replace, py::arg("number"), py::arg("columns"),
             py::arg("device") = 0);
  module.def("roll_back_plan", &roll_back, py::arg("number"), py::arg("device") = 0);
  module.def("plan_status", &status, py::arg("device") = 0);
  module.def("room_ahead", &room_ahead, py::arg("device") = 0);
}

}  // namespace umem::bindings
