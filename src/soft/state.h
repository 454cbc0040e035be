// The one open software device, guarded by device_mutex().
#pragma once
#include <optional>

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

Device* device();  // null while none is open

}  // namespace umem::soft
