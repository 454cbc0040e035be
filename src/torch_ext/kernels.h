// The Python class of kernels that run without torch's dispatcher.
#pragma once
#include <pybind11/pybind11.h>

namespace umem::torch_ext {

void bind_kernels(pybind11::module_& module);

}  // namespace umem::torch_ext
