// The one open software device, guarded by device_mutex().
#pragma once
#include <atomic>
#include <cstdint>

#include "driver/table.h"
#include "soft/clock.h"
#include "soft/lock.h"
#include "soft/move_log.h"
#include "soft/pager.h"

namespace umem::soft {

struct Device {
  explicit Device(const Profile& p) : profile(p), clock(p), log(clock) { pager.set_log(&log); }

  Profile profile;
  Pager pager;
  Clock clock;
  MoveLog log;
  driver::Telemetry counters;  // counters not kept by pager and clock

  // Records the pager's moves for a needed page, or for a request on `stream`.
  void book_fault(const Moved& moved);
  void book_transfer(const Moved& moved, cu::CUstream stream);
  // The next work of `stream` begins when the host's work on these pages is over.
  void wait_for_host(const Pager::Extent& extent, cu::CUstream stream);
};

// The open device; null while none is. Freed by close() only: faults may occur during exit.
extern Device* g_device;
// Page faults in this operation.
extern std::atomic<std::uint64_t> g_faults;

// The part of [ptr, ptr + bytes) that is managed, as an extent of allocated pages.
Pager::Extent managed_part(const void* ptr, std::size_t bytes);

}  // namespace umem::soft
