// `_core_testing`: what tests and benches do to the runtime of `_core`, and no program does.
#pragma once
#include <pybind11/pybind11.h>

namespace umem::bindings {

void bind_driver(pybind11::module_& module);
void bind_inside(pybind11::module_& module);
void bind_bench(pybind11::module_& module);

}  // namespace umem::bindings
