// Device profiles.
#pragma once
#include <cstddef>
#include <string_view>
#include <vector>

#include "base/export.h"

namespace umem::soft {

// The costs of a real device. Source of each figure: profiles.cpp.
struct Profile {
  const char* name;
  double bytes_per_us_in;    // host -> device
  double bytes_per_us_out;   // device -> host
  double fault_us;           // one fault group
  std::size_t memory_bytes;  // memory of the profile's card
  const char* source;
};
UMEM_API const std::vector<Profile>& profiles();
UMEM_API const Profile* find_profile(std::string_view name);  // null if unknown

}  // namespace umem::soft
