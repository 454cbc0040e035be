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
#include "runtime/hooks.h"

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
UMEM_API void reset_peak_stats();
// Returns cached memory to the driver.
UMEM_API Status trim();

// Work that `waiter` gets from now on comes after all that `on` holds, both streams of the device;
// on the software device everything is in program order already. kBadState while either captures.
UMEM_API Status wait_stream(int device, std::uintptr_t waiter, std::uintptr_t on);
// Whether a CUDA graph is captured on the stream; what the driver refuses to tell is no capture.
UMEM_API bool stream_captures(int device, std::uintptr_t stream);

// The driver in use; null before the first start. For `umem doctor` and tests.
UMEM_API driver::Driver* current_driver();

}  // namespace umem::runtime
