// Reports on umem's memory: statistics, bytes by tag, each device's memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/export.h"
#include "base/options.h"
#include "base/status.h"
#include "runtime/stats.h"

namespace umem::runtime {

struct State;
class HeldDevices;

UMEM_API Stats stats();
// Statistics of one device; zeros before its first use. Steps and rolled back plans are counted for
// all devices together. kInvalidArgument: umem does not serve the device.
UMEM_API Result<Stats> device_stats(int ordinal);
// The devices used so far, in ascending order.
UMEM_API std::vector<int> opened_devices();
UMEM_API void reset_peak_stats();
// Page faults by operator, most first. Only the software device counts them.
UMEM_API std::vector<std::pair<std::string, std::uint64_t>> faults_by_operator();

// The figures and options of a session that has ended.
struct SessionRecord {
  Options options;
  Stats last;
  std::uint64_t steps = 0, plans_rolled_back = 0, thrashed_bytes = 0, unmanaged_bytes = 0;
  std::unordered_map<std::string, std::uint64_t> faults_of;
  std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>
      calls;  // by device: allocations, frees, refusals
};
// A replay runs in between. `restore` changes nothing if a session has begun, or a device is open.
UMEM_API SessionRecord session_record();
UMEM_API void restore(SessionRecord record);

// Bytes by tag over all devices; the last row counts freed blocks that are cached.
struct TagReport {
  const char* tag;
  std::size_t blocks = 0, bytes = 0, resident_bytes = 0;
};
UMEM_API std::vector<TagReport> bytes_by_tag();

// Each open device's memory according to the driver, and umem's share of it.
struct DeviceMemory {
  int device = 0;
  std::size_t free_bytes = 0, total_bytes = 0;
  std::size_t allowed_bytes = 0;  // part of the total that the framework allows
  std::size_t budget_bytes = 0;
  std::size_t requested_bytes = 0;  // the budget set for this device alone; 0: none
  std::size_t held_bytes = 0;       // part of the budget: resident, and outside bytes
  std::size_t dropped_bytes = 0;    // discarded: the driver takes it when it needs it
  std::size_t unused_bytes = 0;     // the same, of units that were evicted
};
UMEM_API Status device_memory(std::vector<DeviceMemory>* all);

// Requires the registry's lock. The statistics of devices that are about to be closed.
Stats last_stats(State& s, const HeldDevices& all);
// Requires the registry's lock. Resets the peaks to the current usage.
void reset_peaks(State& s);

}  // namespace umem::runtime
