// The Python border: one bind_*.cpp a noun, each with one of these functions.
#pragma once
#include <pybind11/pybind11.h>

#include "base/status.h"
#include "python/lock.h"
#include "residency/tags.h"

namespace umem::bindings {

using python::interpreter_ended;
using python::Locked;
using python::Unlocked;

void bind_options(pybind11::module_& module);
void bind_runtime(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_hints(pybind11::module_& module);
void bind_trace(pybind11::module_& module);
void bind_awaited(pybind11::module_& module);
void bind_victim_callback(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_interrupts(pybind11::module_& module);
void bind_layout(pybind11::module_& module);
void bind_planner(pybind11::module_& module);
void bind_probe(pybind11::module_& module);
void bind_replay(pybind11::module_& module);
void bind_sleep(pybind11::module_& module);
void bind_transfer_log(pybind11::module_& module);

// The one map from Status to exceptions: the classes of umem.errors.
void raise_if_error(const Status& status);

template <class T>
T value_of(Result<T> result) {
  if (!result.ok()) raise_if_error(result.take_status());
  return std::move(result.value());
}

residency::Tag tag_of(const std::string& name);  // raises if there is none of this name

// For a callback that cannot raise: true if the exception is not the callback's own but a request
// to stop, or was raised by a signal's handler. Then the main thread raises it at its next
// instruction.
bool raise_later(const pybind11::error_already_set& error);

// Without the interpreter's lock: moving bytes may wait, also for another thread.
template <class Call>
auto unlocked(Call call) {
  const Unlocked released;
  return call();
}

template <class Call>
void run(Call call) {
  raise_if_error(unlocked(call));
}

}  // namespace umem::bindings
