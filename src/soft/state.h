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
  driver::Telemetry counters;  // what pager and clock do not keep themselves

  // Books what the pager moved because a page had to come, or because `stream` was told to.
  void book_fault(const Moved& moved);
  void book_transfer(const Moved& moved, cu::CUstream stream);
  // What `stream` does next begins when the host's work on these pages is over.
  void wait_for_host(const Pager::Extent& extent, cu::CUstream stream);
};

Device* device();  // null while none is open

}  // namespace umem::soft
