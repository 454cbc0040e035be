// `_core_testing`: what tests and benches do to the runtime of `_core`, and no program does.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

#include "driver/table.h"

namespace umem::bindings {

void bind_driver(pybind11::module_& module);
void bind_inside(pybind11::module_& module);
void bind_bench(pybind11::module_& module);
void bind_disk(pybind11::module_& module);

}  // namespace umem::bindings

// Fault injection: the n-th call of an entry point fails.
namespace umem::driver {

// Wraps the entry points that the driver has, so that their calls are counted and can fail.
void instrument(Table& table);
// Makes the n-th call (1 = next) of one entry point return `error` without reaching the driver; a
// `torn` one of a batch reaches it with the first half of its ranges.
void inject(Entry entry, std::uint64_t nth_call, CUresult error, bool torn);
void clear_injections();
std::uint64_t calls(Entry entry);  // since `instrument`

}  // namespace umem::driver
