#include "policy/registry.h"

namespace umem::policy {
namespace {

constexpr Policy kPolicies[] = {
    {"none", nullptr, false},
    {"lru", lru_victims, false},
    {"conv_lru", conv_lru_victims, false},
    {"planned", lru_victims, true},
};

}  // namespace

const Policy* find(std::string_view name) {
  for (const Policy& policy : kPolicies)
    if (name == policy.name) return &policy;
  return nullptr;
}

const std::vector<const char*>& names() {
  static const std::vector<const char*> all = [] {
    std::vector<const char*> result;
    for (const Policy& policy : kPolicies) result.push_back(policy.name);
    return result;
  }();
  return all;
}

}  // namespace umem::policy
