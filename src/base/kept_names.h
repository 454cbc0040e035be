// Tables that are indexed by names which programs may invent (record_function("step 17")): they do
// not grow forever.
#pragma once
#include <cstddef>
#include <string>

namespace umem {

inline constexpr std::size_t kMaxNames = 8192;

// The name, or "other" if the table is full and does not have it.
template <class Names>
std::string kept_name(const Names& names, const std::string& name) {
  return names.size() < kMaxNames || names.contains(name) ? name : "other";
}

}  // namespace umem
