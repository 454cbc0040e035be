// Exceptions that native code must pass on, not handle: requests to stop the program.
//
// Python runs a signal's handler between any two of its instructions, those of a callback of umem
// included. Its exception is meant for the program, but cannot pass torch's code, which has no
// exceptions. So the main thread raises it at its next instruction.
#include <deque>
#include <vector>

#include "bindings/bind.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

constexpr int kSignals = 65;  // one more than the last

// The code that a callable runs, if it is Python.
py::object code_of(py::object callable) {
  for (const char* inner : {"func", "__func__"})  // of a partial, of a bound method
    if (py::hasattr(callable, inner)) callable = callable.attr(inner);
  if (!py::hasattr(callable, "__code__")) callable = py::type::of(callable).attr("__call__");
  return py::getattr(callable, "__code__", py::none());
}

// The C module's: no Python instruction runs here, between which a signal could arrive.
std::vector<py::object> handlers() {
  const py::object get = py::module_::import("_signal").attr("getsignal");
  std::vector<py::object> codes;
  for (int number = 1; number < kSignals; ++number) {
    const py::object handler = get(number);
    if (!PyCallable_Check(handler.ptr())) continue;
    py::object code = code_of(handler);
    if (!code.is_none()) codes.push_back(std::move(code));
  }
  return codes;
}

// True if it is a request to stop (KeyboardInterrupt, SystemExit), or was raised by a signal's
// handler. An error that Python code has not caught yet does not know its traceback.
bool is_interrupt(const py::handle& error, py::object entry) {
  if (!py::isinstance(error, PyExc_Exception)) return true;
  if (!entry || entry.is_none()) return false;
  const std::vector<py::object> codes = handlers();
  for (; !entry.is_none(); entry = entry.attr("tb_next")) {
    const py::object ran = entry.attr("tb_frame").attr("f_code");
    for (const py::object& code : codes)
      if (ran.is(code)) return true;
  }
  return false;
}

// Exceptions to raise, in the order of arrival. Never destroyed: some may be left at exit.
std::deque<py::object>& waiting() {
  static auto* errors = new std::deque<py::object>;
  return *errors;
}

int raise_next(void*) {
  const py::object error = std::move(waiting().front());
  waiting().pop_front();
  PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
  return -1;
}

}  // namespace

bool raise_later(const py::error_already_set& error) {
  if (!is_interrupt(error.value(), error.trace())) return false;
  waiting().push_back(error.value());
  if (Py_AddPendingCall(&raise_next, nullptr) == 0) return true;
  waiting().pop_back();
  return false;
}

void bind_interrupts(py::module_& module) {
  module.def("is_interrupt", [](const py::object& error) {
    return is_interrupt(error, error.attr("__traceback__"));
  });
}

}  // namespace umem::bindings
