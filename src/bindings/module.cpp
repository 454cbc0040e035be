#include "bindings/bind.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "umem's native core.";
  module.attr("__version__") = UMEM_VERSION;
  umem::bindings::bind_options(module);
  umem::bindings::bind_runtime(module);
  umem::bindings::bind_memory(module);
  umem::bindings::bind_hints(module);
  umem::bindings::bind_trace(module);
  umem::bindings::bind_victim_callback(module);
  umem::bindings::bind_awaited(module);
  umem::bindings::bind_interrupts(module);
  umem::bindings::bind_plan(module);
  umem::bindings::bind_layout(module);
  umem::bindings::bind_planner(module);
  umem::bindings::bind_probe(module);
  umem::bindings::bind_replay(module);
  umem::bindings::bind_sleep(module);
  umem::bindings::bind_transfer_log(module);
}
