#include "soft/faults.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <mutex>

#include "base/process_limits.h"
#include "soft/lock.h"
#include "soft/state.h"

namespace umem::soft {

namespace {

// The page that this thread's last faults found present, and their number since it became so. A
// thread that lost the race for a page finds it in place and tries again. An access that faults
// repeatedly while the page is present is one that paging cannot serve: executing data, or memory
// that the program protected itself.
struct Patience {
  std::size_t page = 0;
  std::uint32_t arrivals = 0;
  int faults = 0;
};
constinit thread_local Patience t_patience;

bool is_worth_another_try(std::size_t page) {
  static constexpr int kPatience = 64;
  const std::uint32_t arrivals = g_device->pager.page(page).arrivals;
  if (t_patience.page != page || t_patience.arrivals != arrivals) t_patience = {page, arrivals, 0};
  return ++t_patience.faults < kPatience;
}

// Before the process ends, or a system call fails.
void say_refused() {
  char reason[256], line[320];
  Pager& pager = g_device->pager;
  if (pager.disk().on() && pager.disk().describe_failure(reason, sizeof reason)) {
    // That is the reason.
  } else if (pager.space().refused()) {
    describe_reached_limit(reason, sizeof reason);
  } else {
    std::snprintf(reason, sizeof reason,
                  "no frame can be taken from another page: of %zu frames %zu are used, and %zu of "
                  "these cannot leave",
                  pager.frames(), pager.used_frames(), pager.fixed_frames());
  }
  const int n =
      std::snprintf(line, sizeof line, "umem: a managed page cannot be mapped: %s\n", reason);
  [[maybe_unused]] const ssize_t written =
      ::write(STDERR_FILENO, line, std::min(static_cast<std::size_t>(n), sizeof line - 1));
}

bool handle_fault_locked(std::uintptr_t address, bool writes) {
  if (!g_device) return false;
  const std::size_t page = g_device->pager.space().page_of(address);
  if (!g_device->pager.page(page).allocated) return false;
  g_device->wait_for_host({page, 1}, nullptr);
  Moved moved;
  switch (g_device->pager.fault(page, writes, moved)) {
    case Pager::Fault::kBrought:
      g_device->book_fault(moved);
      return true;
    case Pager::Fault::kWritable:
      return true;
    case Pager::Fault::kPresent:
      return is_worth_another_try(page);
    case Pager::Fault::kRefused:
      break;
  }
  say_refused();
  return false;
}

}  // namespace

bool handle_fault(void* address, bool writes) {
  // A fault of the thread that is inside the device is a defect, and must not wait for itself.
  if (!g_bounds.contain(address) || g_owner.load() == this_thread()) return false;
  // The handler's signal mask already blocks everything.
  std::lock_guard guard(device_mutex());
  g_owner = this_thread();
  const bool handled = handle_fault_locked(reinterpret_cast<std::uintptr_t>(address), writes);
  g_owner = 0;
  return handled;
}

Window open_window(const void* ptr, std::size_t bytes, bool writes) {
  if (!g_bounds.contain(ptr)) return Window::kNone;
  DeviceLock lock;
  if (!g_device) return Window::kNone;
  const Pager::Extent extent = managed_part(ptr, bytes);
  if (extent.count == 0) return Window::kNone;
  Moved moved;
  const bool opened = g_device->pager.open_window(extent, writes, moved);
  g_device->book_transfer(moved, nullptr);
  if (!opened) say_refused();
  return opened ? Window::kOpen : Window::kRefused;
}

void close_window(const void* ptr, std::size_t bytes) {
  DeviceLock lock;
  if (!g_device) return;
  Moved moved;
  g_device->pager.close_window(managed_part(ptr, bytes), moved);
  g_device->book_transfer(moved, nullptr);
}

bool windows_are_limited() {
  DeviceLock lock;
  return g_device && g_device->pager.disk().on();
}

}  // namespace umem::soft
