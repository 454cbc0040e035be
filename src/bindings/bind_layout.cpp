// Static layouts: an offset for each large allocation of a step, in numpy arrays of int64.
#include <pybind11/numpy.h>

#include <vector>

#include "bindings/bind.h"
#include "runtime/layouts.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

using Ints = py::array_t<std::int64_t, py::array::c_style>;

void install_layout(const Ints& sizes, const Ints& offsets, std::size_t total, int device,
                    bool stays) {
  if (sizes.ndim() != 1 || offsets.ndim() != 1 || sizes.size() != offsets.size())
    throw py::value_error("install_layout: sizes and offsets are columns of one length");
  std::vector<arena::LayoutEntry> entries;
  for (py::ssize_t i = 0; i < sizes.size(); ++i) {
    if (sizes.at(i) <= 0)
      throw py::value_error("install_layout: an allocation has more than 0 bytes");
    entries.push_back(
        {static_cast<std::size_t>(sizes.at(i)),
         offsets.at(i) < 0 ? arena::kNoPlace : static_cast<std::size_t>(offsets.at(i))});
  }
  run([&] { return runtime::install_layout(entries, total, device, stays); });
}

py::dict layout_status(int device) {
  const arena::LayoutStatus now = unlocked([&] { return runtime::layout_status(device); });
  py::dict result;
  result["entries"] = now.entries;
  result["bytes"] = now.bytes;
  result["hits"] = now.hits;
  result["misses"] = now.misses;
  result["followed"] = now.followed;
  return result;
}

}  // namespace

void bind_layout(py::module_& module) {
  module.def("install_layout", &install_layout, py::arg("sizes"), py::arg("offsets"),
             py::arg("total"), py::arg("device") = 0, py::arg("stays") = false);
  module.def(
      "clear_layout",
      [](int device) {
        const Unlocked unlocked;
        runtime::clear_layout(device);
      },
      py::arg("device") = 0);
  module.def("layout_status", &layout_status, py::arg("device") = 0);
}

}  // namespace umem::bindings
