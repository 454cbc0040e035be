// Native timing loops, so that measurements exclude Python.
#include <chrono>
#include <cstdlib>

#include "core_testing/testing.h"
#include "python/lock.h"
#include "runtime/alloc.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

template <class Body>
double ns_each(std::size_t iterations, Body body) {
  const python::Unlocked unlocked;
  for (std::size_t i = 0; i < iterations / 10 + 1; ++i) body();  // warm
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < iterations; ++i) body();
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  return took.count() / static_cast<double>(iterations);
}

}  // namespace

void bind_bench(py::module_& module) {
  module.def("bench_alloc", [](std::size_t bytes, std::size_t iterations) {
    return ns_each(iterations, [bytes] {
      void* ptr = runtime::allocate(bytes, 0, 0, nullptr);
      runtime::release(ptr);
    });
  });
  module.def("bench_malloc", [](std::size_t bytes, std::size_t iterations) {
    return ns_each(iterations, [bytes] {
      void* volatile ptr = std::malloc(bytes);  // volatile: the pair must not be optimised away
      std::free(ptr);
    });
  });
}

}  // namespace umem::bindings
