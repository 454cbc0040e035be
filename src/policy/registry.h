#pragma once
#include <memory>
#include <string_view>
#include <vector>

#include "base/export.h"
#include "residency/policy.h"

namespace umem::policy {

// Null when there is no policy of this name.
std::unique_ptr<residency::Policy> make(std::string_view name);
UMEM_API const std::vector<const char*>& names();

}  // namespace umem::policy
