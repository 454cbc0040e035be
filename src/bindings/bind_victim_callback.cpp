// A Python function that chooses evictions. It is called with the interpreter's lock and without
// the runtime's (the reason is in runtime/victim_callback.h).
#include <cstdint>
#include <vector>

#include "bindings/bind.h"
#include "runtime/victim_callback.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

// With the interpreter's lock held.
struct Registered {
  py::object function;
  bool complained = false;
};
Registered& registered() {
  static auto* one = new Registered;  // outlives the interpreter, which must not destroy it twice
  return *one;
}

py::list rows(const runtime::Shortage& shortage) {
  py::list result(shortage.candidates.size());
  std::size_t i = 0;
  for (const runtime::Candidate& unit : shortage.candidates)
    result[i++] = py::make_tuple(unit.id, unit.bytes, residency::name(unit.tag),
                                 residency::name(unit.family), unit.last_use, unit.segment);
  return result;
}

// A value that is not a unit's id becomes 0, which is none either, and counts as ignored.
std::uint32_t id_of(const py::handle& value) {
  int overflow = 0;
  const long long id = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (id == -1 && PyErr_Occurred()) throw py::error_already_set();
  return overflow != 0 || id < 0 || id > UINT32_MAX ? 0 : static_cast<std::uint32_t>(id);
}

// Its own exceptions are reported once, and the built-in order decides.
void ask(const runtime::Shortage& shortage, std::vector<std::uint32_t>& ids) {
  if (interpreter_ended()) return;
  const Locked gil;
  const py::object function = registered().function;
  if (!function || function.is_none()) return;
  try {
    const py::object answer =
        function(rows(shortage), shortage.resident_bytes, shortage.budget_bytes, shortage.need);
    for (const py::handle& id : answer) ids.push_back(id_of(id));
  } catch (py::error_already_set& error) {
    ids.clear();
    if (raise_later(error)) return;
    error.restore();
    if (registered().complained)
      PyErr_Clear();
    else
      PyErr_WriteUnraisable(function.ptr());
    registered().complained = true;
  }
}

void set_victim_callback(const py::object& function) {
  if (!function.is_none() && !PyCallable_Check(function.ptr()))
    throw py::type_error("set_advisor takes a function, or None");
  static const bool at_exit = [] {  // no call while the interpreter ends
    py::module_::import("atexit").attr("register")(py::cpp_function([] {
      runtime::set_victim_callback(nullptr);
      registered().function = py::none();
    }));
    return true;
  }();
  (void)at_exit;
  registered() = {function, false};
  runtime::set_victim_callback(function.is_none() ? nullptr : &ask);
}

}  // namespace

void bind_victim_callback(py::module_& module) {
  module.def("set_advisor", &set_victim_callback);
}

}  // namespace umem::bindings
