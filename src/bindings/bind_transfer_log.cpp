#include <vector>

#include "bindings/bind.h"
#include "runtime/transfer_log.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

py::tuple take_transfer_log() {
  std::size_t left_out = 0;
  const std::vector<runtime::LoggedTransfer> taken =
      unlocked([&] { return runtime::take_transfer_log(&left_out); });
  py::list rows;
  for (const runtime::LoggedTransfer& each : taken)
    rows.append(py::make_tuple(each.device, each.what, each.bytes, each.begin_ns, each.end_ns));
  return py::make_tuple(rows, left_out);
}

}  // namespace

void bind_transfer_log(py::module_& module) {
  module.def("start_transfer_log", [] { run([] { return runtime::start_transfer_log(); }); });
  module.def("take_transfer_log", &take_transfer_log);
}

}  // namespace umem::bindings
