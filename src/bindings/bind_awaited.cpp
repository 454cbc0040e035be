// A Python function that brings the contents of a storage before an op uses it.
#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "runtime/awaited.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

// Never destroyed: ops run while the interpreter shuts down.
py::object& function() {
  static auto* one = new py::object;
  return *one;
}

// Its exceptions cannot pass torch's code: it keeps its errors for the next step.
void arrive(const void* storage) {
  if (interpreter_ended()) return;
  const Locked gil;
  const py::object call = function();
  if (!call || call.is_none()) return;
  const py::error_scope outside;
  try {
    call(reinterpret_cast<std::uintptr_t>(storage));
  } catch (py::error_already_set& error) {
    if (!raise_later(error)) error.discard_as_unraisable("umem's wait for an update on the host");
  }
}

void set_awaited(const std::vector<std::uintptr_t>& storages, const py::object& call) {
  function() = call;
  std::vector<const void*> pointers;
  pointers.reserve(storages.size());
  for (const std::uintptr_t storage : storages)
    pointers.push_back(reinterpret_cast<const void*>(storage));
  unlocked([&] { runtime::set_awaited(std::move(pointers), &arrive); });
}

// On the calling thread, which gets what the function raises.
void bring_awaited() {
  if (!runtime::awaiting()) return;  // as in a forked child, where the lock may stay taken
  const std::vector<const void*> storages = unlocked(&runtime::awaited_storages);
  const py::object call = function();
  for (const void* storage : storages) call(reinterpret_cast<std::uintptr_t>(storage));
}

}  // namespace

void bind_awaited(py::module_& module) {
  module.def("set_awaited", &set_awaited, py::arg("storages"), py::arg("arrive"));
  module.def("bring_awaited", &bring_awaited);
}

}  // namespace umem::bindings
