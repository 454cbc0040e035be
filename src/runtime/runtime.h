// The runtime joins arena, engine and driver. It is the only singleton, and is never destroyed:
// blocks may outlive any shutdown.
#pragma once
#include <cstddef>
#include <string>

#include "base/options.h"
#include "base/status.h"
#include "driver/table.h"

namespace umem::runtime {

// Opens the device and starts. Ok if already running with equal options; kBadState if running with
// other options, or if live blocks tie the device to other options.
UMEM_API Status start(const Options& options);
// Stops handing out memory; live blocks stay valid until they are freed.
UMEM_API Status stop();
UMEM_API bool running();
UMEM_API Options current_options();

// Takes effect at once in both directions; kInvalidArgument below the floor.
UMEM_API Status set_budget(std::size_t device_bytes, std::size_t host_bytes);
UMEM_API Status set_policy(const std::string& name);

// Returns cached memory to the driver.
UMEM_API Status trim();

// The driver in use; null before the first start. For `umem doctor` and tests.
UMEM_API driver::Driver* current_driver();

}  // namespace umem::runtime
