// The runtime joins arena, residency and driver. It is the only singleton, and it is never
// destroyed: blocks outlive every caller's idea of shutdown.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/options.h"
#include "base/status.h"
#include "driver/table.h"
#include "residency/tags.h"
#include "runtime/alloc.h"
#include "runtime/ops.h"

namespace umem::runtime {

// docs/options.md and umem.Stats describe each field.
struct Stats {
#define UMEM_STAT(name, doc) std::uint64_t name = 0;
#include "runtime/stats.def"
#undef UMEM_STAT
};

// Opens the device and starts. Ok when already running with equal options; kBadState when running
// with others, or when live blocks hold the device to other options.
UMEM_API Status start(const Options& options);
// No new memory is handed out; live blocks stay valid until they are freed.
UMEM_API Status stop();
UMEM_API bool running();
UMEM_API Options current_options();

// Takes effect at once in both directions; kInvalidArgument below the floor.
UMEM_API Status set_budget(std::size_t device_bytes, std::size_t host_bytes);
UMEM_API Status set_policy(const std::string& name);

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
// Returns cached memory to the driver.
UMEM_API Status trim();

// Work that `waiter` gets from now on comes after all that `on` holds, both streams of the device;
// on the software device everything is in program order already. kBadState while either captures.
UMEM_API Status wait_stream(int device, std::uintptr_t waiter, std::uintptr_t on);
// Whether a CUDA graph is captured on the stream; what the driver refuses to tell is no capture.
UMEM_API bool stream_captures(int device, std::uintptr_t stream);

// sleep.cpp. Gives back the device memory of what has these tags (bits by residency::Tag), and all
// that is cached: when it returns, the driver has it. Pointers stay valid, and an op brings back
// what it needs. `discard`: the bytes are lost instead of kept on the host. kBadState in the middle
// of an op or of a graph's capture, kOutOfHostMemory where the host budget has no room,
// kNotSupported where memory cannot move: nothing was moved then.
struct Slept {
  std::uint64_t number = 0;  // for `wake`
  std::size_t bytes = 0;     // given back
  // Whether the driver shows them as free; else it gives them to whoever allocates.
  bool released = true;
};
UMEM_API Status sleep(std::uint32_t tags, bool discard, Slept* slept);
// Brings back what sleeps of the tags, by last use, as far as it fits; of one sleep, or (0) of all.
// The moves are under way when it returns, and ops wait for what they use. `bytes`: of them.
UMEM_API Status wake(std::uint32_t tags, std::uint64_t number, std::size_t* bytes);

// transfer_log.cpp. When each transfer was under way, of all devices, from the first call to the
// second: what is not done by then is not told, and no more than LaneLog::kMost of a lane, but for
// how many are `left_out`. Where umem is off there are none.
struct LoggedTransfer {
  int device = 0;
  const char* what = "";
  std::size_t bytes = 0;
  std::int64_t begin_ns = 0, end_ns = 0;  // since 1970
};
UMEM_API Status start_transfer_log();
UMEM_API std::vector<LoggedTransfer> take_transfer_log(std::size_t* left_out);

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

// The driver in use; null before the first start. For `umem doctor` and tests.
UMEM_API driver::Driver* current_driver();

}  // namespace umem::runtime
