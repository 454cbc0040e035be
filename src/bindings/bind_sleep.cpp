#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/bind.h"
#include "residency/tags.h"
#include "runtime/accounts.h"
#include "runtime/reports.h"
#include "runtime/sleep.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

std::uint32_t bits_of(const std::vector<std::string>& names) {
  std::uint32_t bits = 0;
  for (const std::string& name : names) bits |= 1U << static_cast<unsigned>(tag_of(name));
  return bits;
}

py::tuple sleep(const std::vector<std::string>& tags, bool discard) {
  runtime::Slept slept;
  const std::uint32_t bits = bits_of(tags);
  run([&] { return runtime::sleep(bits, discard, &slept); });
  return py::make_tuple(slept.number, slept.bytes, slept.released);
}

std::size_t wake(const std::vector<std::string>& tags, std::uint64_t number) {
  std::size_t bytes = 0;
  const std::uint32_t bits = bits_of(tags);
  run([&] { return runtime::wake(bits, number, &bytes); });
  return bytes;
}

py::dict bytes_by_tag() {
  const std::vector<runtime::TagReport> rows = unlocked([&] { return runtime::bytes_by_tag(); });
  py::dict result;
  for (const runtime::TagReport& row : rows)
    result[row.tag] = py::make_tuple(row.blocks, row.bytes, row.resident_bytes);
  return result;
}

py::list device_memory() {
  std::vector<runtime::DeviceMemory> rows;
  run([&] { return runtime::device_memory(&rows); });
  py::list result;
  for (const runtime::DeviceMemory& row : rows) {
    py::dict entry;
    entry["device"] = row.device;
    entry["free_bytes"] = row.free_bytes;
    entry["total_bytes"] = row.total_bytes;
    entry["budget_bytes"] = row.budget_bytes;
    entry["allowed_bytes"] = row.allowed_bytes;
    entry["requested_bytes"] = row.requested_bytes;
    entry["held_bytes"] = row.held_bytes;
    entry["dropped_bytes"] = row.dropped_bytes;
    entry["unused_bytes"] = row.unused_bytes;
    result.append(entry);
  }
  return result;
}

void set_device_budget(int device, std::size_t bytes) {
  runtime::Failure failure;
  {
    const Unlocked unlocked;
    runtime::set_budget(device, bytes, &failure);
  }
  if (failure.code != 0) raise_if_error(Status(static_cast<Code>(failure.code), failure.message));
}

py::list tags() {
  py::list names;
  for (int tag = 0; tag < static_cast<int>(residency::Tag::kCount); ++tag)
    names.append(residency::name(static_cast<residency::Tag>(tag)));
  return names;
}

}  // namespace

void bind_sleep(py::module_& module) {
  module.def("sleep", &sleep);
  module.def("wake", &wake);
  module.def("tags", &tags);
  module.def("bytes_by_tag", &bytes_by_tag);
  module.def("device_memory", &device_memory);
  module.def("set_device_budget", &set_device_budget);
}

}  // namespace umem::bindings
