// The Python module `_torch_ext`. Built with the pybind11 that torch carries.
#include <pybind11/pybind11.h>
#include <torch/headeronly/version.h>

#include "torch_ext/cpu_allocator.h"
#ifdef UMEM_WITH_CUDA
#include "torch_ext/cuda/install.h"
#endif
#include "torch_ext/kernels.h"
#include "torch_ext/observer.h"

namespace py = pybind11;
using namespace umem::torch_ext;

namespace {

#ifdef UMEM_WITH_CUDA
constexpr bool kWithCuda = true;

void bind_cuda(py::module_& module) {
  module.def("install_cuda_allocator", &install_cuda_allocator,
             "Make umem torch's CUDA allocator.");
  module.def("remove_cuda_allocator", &remove_cuda_allocator,
             "Give torch its CUDA allocator back.");
}
#else
constexpr bool kWithCuda = false;

void bind_cuda(py::module_&) {}
#endif

}  // namespace

PYBIND11_MODULE(_torch_ext, module) {
  module.doc() = "umem's C++ part inside torch: allocators and op observer.";
  module.attr("with_cuda") = kWithCuda;
  bind_cuda(module);
  module.attr("torch_version") = TORCH_VERSION;
  module.def("install_allocator", &install_allocator, "Make umem torch's CPU allocator.");
  module.def("remove_allocator", &remove_allocator, "Give torch its CPU allocator back.");
  module.def("allocator_installed", &allocator_installed);
  module.def("allocate_outside", &allocate_outside, py::arg("outside"),
             "Set whether this thread's CPU tensors are outside of umem's memory; return the "
             "previous setting.");
  module.def("install_observer", &install_observer, "Start reporting every op to umem.");
  module.def("remove_observer", &remove_observer);
  module.def("observing", &observing);
  bind_kernels(module);
  module.def("bench_cpu_alloc", &bench_cpu_alloc, py::arg("nbytes"), py::arg("iterations"),
             "Mean ns of one allocation and free through torch's present CPU allocator.");
}
