#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "runtime/hints.h"
#include "runtime/pins.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

using Pairs = std::vector<std::pair<std::uintptr_t, std::size_t>>;  // address, bytes

runtime::MemSpans spans(const Pairs& pairs) {
  runtime::MemSpans result;
  for (const auto& [address, bytes] : pairs) result.push_back({address, bytes});
  return result;
}

// As a function of one span, and of a list of them.
template <class Act>
void define(py::module_& module, const char* name, Act act) {
  module.def(name, [act](std::uintptr_t address, std::size_t bytes) {
    run([&] { return act({{address, bytes}}); });
  });
  module.def(name, [act](const Pairs& pairs) { run([&] { return act(spans(pairs)); }); });
}

std::uint64_t add_pins(const Pairs& pairs, const std::string& kind,
                       const std::vector<std::string>& labels) {
  if (kind != "pin" && kind != "exempt")
    raise_if_error(Status(Code::kInvalidArgument, "a hold is pin or exempt, not '" + kind + "'"));
  const auto wanted = kind == "pin" ? runtime::PinKind::kPin : runtime::PinKind::kExempt;
  return value_of(unlocked([&] { return runtime::add_pins(spans(pairs), wanted, labels); }));
}

std::uint64_t exempt_all(const std::string& tag, std::size_t min_bytes, std::size_t max_bytes) {
  const residency::Tag wanted = tag.empty() ? residency::Tag::kCount : tag_of(tag);
  return value_of(unlocked([&] { return runtime::exempt_all(wanted, min_bytes, max_bytes); }));
}

py::dict row(const runtime::Placement& at) {
  py::dict result;
  result["bytes"] = at.bytes;
  result["resident_bytes"] = at.resident;
  result["evicted_bytes"] = at.evicted;
  result["discarded_bytes"] = at.discarded;
  result["unknown_bytes"] = at.unknown;
  result["arriving_bytes"] = at.arriving;
  result["leaving_bytes"] = at.leaving;
  result["pins"] = at.pins;
  result["exempt"] = at.exempt;
  result["in_use"] = at.in_use;
  result["tag"] = at.tag;
  result["family"] = at.family;
  result["scope"] = at.scope;
  return result;
}

py::list placed_blocks() {
  py::list result;
  for (const runtime::PlacedBlock& block : unlocked(&runtime::placed_blocks)) {
    py::dict made = row(block.at);
    made["address"] = block.address;
    result.append(made);
  }
  return result;
}

}  // namespace

void bind_hints(py::module_& module) {
  define(module, "prefetch", [](const runtime::MemSpans& all) { return runtime::prefetch(all); });
  define(module, "evict", [](const runtime::MemSpans& all) { return runtime::evict(all); });
  module.def("read_mostly", [](std::uintptr_t address, std::size_t bytes, bool on) {
    run([&] { return runtime::read_mostly({{address, bytes}}, on); });
  });
  module.def(
      "discard",
      [](std::uintptr_t address, std::size_t bytes, std::uintptr_t stream) {
        return value_of(unlocked([&] { return runtime::discard({address, bytes}, stream); }));
      },
      py::arg("ptr"), py::arg("nbytes"), py::arg("stream") = 0);
  module.def("place_in_file", [](std::uintptr_t address, std::size_t bytes, const std::string& path,
                                 std::uint64_t offset) {
    return value_of(
        unlocked([&] { return runtime::place_in_file({address, bytes}, path, offset); }));
  });
  module.def("own_pages", [](std::uintptr_t address, std::size_t bytes) {
    return value_of(unlocked([&] { return runtime::own_pages({address, bytes}); }));
  });
  module.def("staying", [](const Pairs& pairs) {
    return unlocked([&] { return runtime::kept_in_place(spans(pairs)); });
  });
  module.def("hold", &add_pins);
  module.def("exempt_all", &exempt_all);
  module.def("unhold",
             [](std::uint64_t number) { unlocked([&] { runtime::remove_pins(number); }); });
  module.def("unpin", [](std::uintptr_t address, std::size_t bytes) {
    return unlocked([&] { return runtime::unpin({address, bytes}); });
  });
  module.def("where", [](std::uintptr_t address, std::size_t bytes) {
    return row(value_of(unlocked([&] { return runtime::placement_of({address, bytes}); })));
  });
  module.def("placed_blocks", &placed_blocks);
  module.def("set_scope", [](const std::string& name) {
    return unlocked([&] { return runtime::set_scope(name); });
  });
}

}  // namespace umem::bindings
