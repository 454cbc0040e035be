#include "core_testing/testing.h"

PYBIND11_MODULE(_core_testing, module) {
  module.doc() = "The inside of umem's native core, for tests and benches.";
  umem::bindings::bind_driver(module);
  umem::bindings::bind_inside(module);
  umem::bindings::bind_bench(module);
  umem::bindings::bind_disk(module);
}
