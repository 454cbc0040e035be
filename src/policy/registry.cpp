#include "policy/registry.h"

#include "policy/planned.h"
#include "policy/policies.h"

namespace umem::policy {
namespace {

std::unique_ptr<residency::Policy> make_planned() {
  return std::make_unique<Planned>();
}

struct Row {
  const char* name;
  std::unique_ptr<residency::Policy> (*make)();
};
constexpr Row kRows[] = {
    {"none", make_none}, {"lru", make_lru}, {"conv_lru", make_conv_lru}, {"planned", make_planned}};

}  // namespace

std::unique_ptr<residency::Policy> make(std::string_view name) {
  for (const Row& row : kRows)
    if (name == row.name) return row.make();
  return nullptr;
}

const std::vector<const char*>& names() {
  static const std::vector<const char*> all = [] {
    std::vector<const char*> result;
    for (const Row& row : kRows) result.push_back(row.name);
    return result;
  }();
  return all;
}

}  // namespace umem::policy
