#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/kept_names.h"
#include "bindings/bind.h"
#include "residency/op_family.h"
#include "runtime/alloc.h"
#include "runtime/awaited.h"
#include "runtime/ops.h"
#include "runtime/streams.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

using residency::Tag;

const void* pointer(std::uintptr_t address) {
  return reinterpret_cast<const void*>(address);
}

std::vector<const void*> pointers(const std::vector<std::uintptr_t>& addresses) {
  std::vector<const void*> result;
  for (std::uintptr_t address : addresses) result.push_back(pointer(address));
  return result;
}

runtime::Phase phase_of(const std::string& name) {
  if (name == "forward") return runtime::Phase::kForward;
  if (name == "backward") return runtime::Phase::kBackward;
  if (name == "optimizer") return runtime::Phase::kOptimizer;
  return runtime::Phase::kNone;
}

// Ops begun from Python, by token; touched with the GIL held only.
struct PythonOp {
  std::unique_ptr<runtime::Op> op;
  unsigned long thread;
};
std::unordered_map<std::uint64_t, PythonOp>& python_ops() {
  static auto* ops = new std::unordered_map<std::uint64_t, PythonOp>;
  return *ops;
}

// Names of ops remain valid forever.
const char* lasting(const std::string& name) {
  static auto* names = new std::unordered_set<std::string>;
  return names->insert(kept_name(*names, name)).first->c_str();
}

// `parts`: the offset and bytes used of the input with that index; other inputs are used whole.
std::uint64_t begin(const std::vector<std::uintptr_t>& inputs, const std::string& family,
                    const std::string& phase, const std::string& name, std::uint32_t overwritten,
                    std::uint32_t written,
                    const std::map<std::size_t, std::pair<std::size_t, std::size_t>>& parts,
                    int device, std::uintptr_t stream) {
  static std::uint64_t next_token = 0;
  auto op = std::make_unique<runtime::Op>();
  const residency::Family found = residency::find_family(family);
  op->family = found == residency::Family::kCount ? residency::Family::kNone : found;
  op->phase = phase_of(phase);
  op->name = lasting(name);
  op->n_overwritten = overwritten;
  op->n_written = written;
  op->device = device;
  op->stream = stream;
  std::vector<runtime::Input> list;
  for (const void* storage : pointers(inputs)) list.push_back({storage});
  for (const auto& [i, part] : parts) {
    if (i >= list.size()) throw py::index_error("parts name an input that there is not");
    std::tie(list[i].offset, list[i].bytes) = part;
  }
  {
    const Unlocked unlocked;
    if (runtime::awaiting()) runtime::await_contents(list.data(), list.size());
    runtime::op_begin(op.get(), list.data(), list.size());
  }
  python_ops().emplace(++next_token, PythonOp{std::move(op), PyThread_get_thread_ident()});
  return next_token;
}

void end(std::uint64_t token, const std::string& tag) {
  auto found = python_ops().find(token);
  if (found == python_ops().end()) throw py::key_error("no op was begun with this token");
  if (found->second.thread != PyThread_get_thread_ident())
    raise_if_error(Status(Code::kBadState, "an op ends on the thread that it began on"));
  const std::unique_ptr<runtime::Op> op = std::move(found->second.op);
  python_ops().erase(found);
  const Unlocked unlocked;
  runtime::op_end(op.get(), residency::find_tag(tag));  // "": none
}

std::uintptr_t allocate(std::size_t bytes, int device, std::uintptr_t stream) {
  runtime::Failure failure;
  void* ptr = nullptr;
  {
    const Unlocked unlocked;
    ptr = runtime::allocate(bytes, device, stream, &failure);
  }
  if (failure.code != 0) raise_if_error(Status(static_cast<Code>(failure.code), failure.message));
  return reinterpret_cast<std::uintptr_t>(ptr);
}

}  // namespace

void bind_memory(py::module_& module) {
  module.def("allocate", &allocate, py::arg("nbytes"), py::arg("device") = 0,
             py::arg("stream") = 0);
  module.def("release", [](std::uintptr_t address) {
    const Unlocked unlocked;
    return runtime::release(reinterpret_cast<void*>(address));
  });
  module.def("record_stream", [](std::uintptr_t address, std::uintptr_t stream) {
    const Unlocked unlocked;
    return runtime::record_stream(pointer(address), stream);
  });
  module.def("stream_captures", [](int device, std::uintptr_t stream) {
    const Unlocked unlocked;
    return runtime::stream_captures(device, stream);
  });
  module.def("wait_stream", [](int device, std::uintptr_t waiter, std::uintptr_t on) {
    run([=] { return runtime::wait_stream(device, waiter, on); });
  });
  module.def("owns", [](std::uintptr_t address) { return runtime::owns(pointer(address)); });
  module.def("tag", [](std::uintptr_t address, const std::string& name) {
    const residency::Tag tag = tag_of(name);
    const Unlocked unlocked;
    return runtime::tag(pointer(address), tag);
  });
  module.def("op_begin", &begin, py::arg("pointers"), py::arg("family"), py::arg("phase"),
             py::arg("name") = "", py::arg("n_overwritten") = 0, py::arg("n_written") = 0,
             py::arg("parts") = py::dict(), py::arg("device") = 0, py::arg("stream") = 0);
  module.def("op_end", &end);
  module.def("family_of",
             [](const std::string& name) { return residency::name(residency::family_of(name)); });
}

}  // namespace umem::bindings
