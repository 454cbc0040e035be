// The native policies by name.
#pragma once
#include <string_view>
#include <vector>

#include "base/export.h"
#include "policy/victims.h"

namespace umem::policy {

struct Policy {
  const char* name;
  // Null: the engine neither evicts nor prefetches. Page faults of the driver do it all, as in
  // plain unified memory: the baseline.
  Victims* victims;
  bool follows_plans;  // so that the engine has a `Planned`, which chooses the victims
};

// Null if there is no policy of this name.
const Policy* find(std::string_view name);
UMEM_API const std::vector<const char*>& names();

}  // namespace umem::policy
