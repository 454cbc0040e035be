// What umem says of its memory: statistics, bytes by tag, each device's memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/export.h"
#include "base/status.h"
#include "runtime/stats.h"

namespace umem::runtime {

struct State;
class HeldDevices;

UMEM_API Stats stats();
// Of one device: zeros before its first use. Steps, and plans that were rolled back, are counted
// for all of them together. kInvalidArgument: umem does not serve it.
UMEM_API Result<Stats> device_stats(int ordinal);
// Of what was used so far, in order.
UMEM_API std::vector<int> opened_devices();
UMEM_API void reset_peak_stats();
// The operators that took page faults, by name, most first. The software device knows; a GPU's
// driver does not tell.
UMEM_API std::vector<std::pair<std::string, std::uint64_t>> faults_by_operator();

// Bytes by tag, of all devices; the last row is of freed blocks that are kept for reuse.
struct TagReport {
  const char* tag;
  std::size_t blocks = 0, bytes = 0, resident_bytes = 0;
};
UMEM_API std::vector<TagReport> bytes_by_tag();

// Each open device's memory as the driver has it, beside umem's share of it.
struct DeviceMemory {
  int device = 0;
  std::size_t free_bytes = 0, total_bytes = 0;
  std::size_t allowed_bytes = 0;  // of the total, by the framework's setting
  std::size_t budget_bytes = 0;
  std::size_t held_bytes = 0;     // of the budget: resident, and what counts with it
  std::size_t dropped_bytes = 0;  // discarded, and the driver's to take
  std::size_t unused_bytes = 0;   // the same of what has left, or is on the host alone
};
UMEM_API Status device_memory(std::vector<DeviceMemory>* all);

// With the registry's lock: what devices that are about to be closed have counted.
Stats last_stats(State& s, const HeldDevices& all);
// With the registry's lock: the present state is the peak.
void reset_peaks(State& s);

}  // namespace umem::runtime
