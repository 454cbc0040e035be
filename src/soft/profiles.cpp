#include "soft/profiles.h"

#include "base/units.h"

namespace umem::soft {

// Link figures are nominal sustained rates each way, full duplex, fixed so that results compare;
// the fault figure is the one of G10's model (MICRO'23). None was measured by umem.
const std::vector<Profile>& profiles() {
  static const std::vector<Profile> all = {
      {"a100-pcie4", 25e3, 25e3, 45.0, 40 * GiB, "nominal PCIe 4.0 x16; fault cost from G10"},
      {"rtx4090-pcie4", 25e3, 25e3, 45.0, 24 * GiB, "nominal PCIe 4.0 x16; fault cost from G10"},
      {"h200-pcie5", 55e3, 55e3, 45.0, 139 * GiB, "nominal PCIe 5.0 x16; fault cost from G10"},
      {"gh200-c2c", 400e3, 400e3, 45.0, 96 * GiB, "nominal NVLink-C2C; fault cost from G10"},
      {"cpu-disk", 1.5e3, 1.5e3, 100.0, 16 * GiB, "assumed: a CPU with a disk; doctor measures"},
  };
  return all;
}

const Profile* find_profile(std::string_view name) {
  for (const Profile& profile : profiles())
    if (name == profile.name) return &profile;
  return nullptr;
}

}  // namespace umem::soft
