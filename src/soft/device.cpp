#include "soft/device.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/process_limits.h"
#include "soft/entries.h"
#include "soft/fault_handler.h"
#include "soft/interpose.h"
#include "soft/lock.h"
#include "soft/state.h"

namespace umem::soft {
namespace {

std::atomic<bool> g_operations{false};  // the pager's: begun
sigset_t g_signals_before_fork;         // of the thread that forks, which has the lock

// With the lock held; null without a disk.
Disk* open_disk() {
  return g_device && g_device->pager.disk().on() ? &g_device->pager.disk() : nullptr;
}

// The threads that were inside of system calls are the parent's.
void end_system_calls() {
  if (!g_device || g_unbacked) return;
  Moved moved;
  g_device->pager.close_all_windows(moved);
  g_device->book_transfer(moved, nullptr);
}

void unlock_after_fork() {
  const sigset_t previous = g_signals_before_fork;
  device_mutex().unlock();
  unlock_fault_handler_after_fork();
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
}

driver::Telemetry telemetry() {
  DeviceLock lock;
  if (!g_device) return {};
  driver::Telemetry result = g_device->counters;
  result.resident_bytes = g_device->pager.held_frames() << kPageShift;
  result.peak_resident_bytes = g_device->pager.peak_frames() << kPageShift;
  result.host_bytes = g_device->pager.host_bytes();
  result.peak_host_bytes = g_device->pager.peak_host_bytes();
  result.stall_us = static_cast<std::uint64_t>(g_device->clock.stall_us());
  if (const Disk* disk = open_disk()) {
    result.disk = disk->counters();
    result.stall_us = result.disk.wait_us;  // its time is real
  }
  return result;
}

void reset_peak() {
  DeviceLock lock;
  if (g_device) g_device->pager.reset_peak();
}

Status resize(std::size_t device_bytes) {
  const std::size_t frames = device_bytes >> kPageShift;
  if (frames < kMinFrames)
    return {Code::kInvalidArgument, "the software device needs at least 4 frames of 2 MiB"};
  DeviceLock lock;
  if (!g_device) return {Code::kBadState, "no software device is open"};
  Moved moved;
  const std::size_t before = g_device->pager.frames();
  const bool done = g_device->pager.set_frames(frames, moved);
  g_device->book_transfer(moved, nullptr);
  if (!done && g_device->pager.space().refused()) {
    char reason[160];
    const std::size_t more = (frames - std::min(frames, before)) << kPageShift;
    return {Code::kOutOfHostMemory, std::string("the kernel refuses memory for the frames: ") +
                                        describe_reached_limit(reason, sizeof reason, more)};
  }
  if (!done) return {Code::kOutOfDeviceMemory, "the pages in use do not fit fewer frames"};
  return {};
}

void give_back() {
  DeviceLock lock;
  if (g_device) g_device->pager.give_back();
}

Status place_in_file(std::uintptr_t ptr, std::size_t bytes, const std::string& path,
                     std::uint64_t offset) {
  DeviceLock lock;
  if (!g_device) return {Code::kBadState, "no software device is open"};
  const Pager::Extent extent = managed_part(reinterpret_cast<const void*>(ptr), bytes);
  if (extent.count == 0 || ptr % kPageBytes != 0 || extent.count < pages_of(bytes))
    return {Code::kInvalidArgument, "these are no whole pages of managed memory"};
  return g_device->pager.place_in(extent, path, offset, bytes);
}

driver::Operation end_operation() {
  const std::uint64_t faults = g_faults.exchange(0, std::memory_order_relaxed);
  const bool first = !g_operations.exchange(true, std::memory_order_relaxed);
  if (faults == 0 && !first) return {};
  DeviceLock lock;
  return {faults, g_device ? g_device->pager.end_operation() << kPageShift : 0};
}

}  // namespace

// A forked child keeps a private copy of the whole device, consistent because no thread was inside.
void register_fork_handlers() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(
        [] {
          const sigset_t previous = block_signals();
          lock_fault_handler_for_fork();
          device_mutex().lock();
          g_signals_before_fork = previous;
          if (Disk* disk = open_disk()) disk->prepare_fork();
        },
        [] {
          if (Disk* disk = open_disk()) disk->forked_parent();
          unlock_after_fork();
        },
        [] {
          if (Disk* disk = open_disk()) disk->forked_child();
          end_system_calls();
          unlock_after_fork();
        });
  });
}

Status open(const Options& options, driver::Driver& driver) {
  if (!options.profile) return {Code::kInvalidArgument, "a device profile is needed"};
  const std::size_t frames = options.device_bytes >> kPageShift;
  if (frames < kMinFrames)
    return {Code::kInvalidArgument, "the software device needs at least 4 frames of 2 MiB"};
  register_fork_handlers();
  if (!options.disk.empty() && (!options.backed || options.uvm))
    return {Code::kInvalidArgument, "a disk is for a device with memory, and frees its frames"};
  const DiskOptions disk{options.disk, options.disk_bytes,
                         std::max<std::size_t>(options.staging_bytes >> kPageShift, 1)};
  {
    DeviceLock lock;
    if (g_device) return {Code::kBadState, "a software device is open already"};
    auto device = std::make_unique<Device>(*options.profile);
    UMEM_RETURN_IF_ERROR(device->pager.open(frames, options.backed, options.uvm, disk));
    g_device = device.release();
    g_unbacked = !options.backed;
    const Space& space = g_device->pager.space();
    if (options.backed) {  // no access can be helped otherwise
      g_bounds.end = space.managed(space.pages());
      g_bounds.begin = space.managed(0);
    }
  }
  if (options.backed) {
    install_interposers();  // before the handler, so that it is not replaced unseen
    install_fault_handler();
  }
  g_faults = 0;
  g_operations = false;
  driver = driver::Driver{driver::Kind::kSoft, {},        telemetry,     reset_peak,  resize,
                          end_operation,       give_back, place_in_file, options.disk};
  fill_entries(driver.table);
  driver::fill_missing(driver.table);
  return {};
}

Status close() {
  DeviceLock lock;
  if (!g_device) return {Code::kBadState, "no software device is open"};
  if (!g_device->pager.empty())
    return {Code::kBadState, "managed memory is still allocated on the software device"};
  g_bounds.begin = g_bounds.end = 0;
  g_unbacked = false;
  g_device->pager.close();
  delete std::exchange(g_device, nullptr);
  return {};
}

void launch(cu::CUstream stream, double us) {
  DeviceLock lock;
  if (g_device && g_device->clock.known(stream)) g_device->clock.launch(stream, us);
}

namespace {

// With the lock held: the page faults that the access takes.
Status fault_in(const Access& access) {
  Pager& pager = g_device->pager;
  const Space& space = pager.space();
  if (access.bytes == 0) return {};
  const std::uintptr_t last = access.ptr + access.bytes - 1;
  if (!space.contains(access.ptr) || !space.contains(last) || last < access.ptr)
    return {Code::kInvalidArgument, "an access to memory that is not managed"};
  for (std::size_t i = space.page_of(access.ptr); i <= space.page_of(last); ++i) {
    while (!pager.accessible(i, access.write)) {
      if (!pager.page(i).allocated)
        return {Code::kInvalidArgument, "an access to memory that is not allocated"};
      Moved moved;
      g_device->wait_for_host({i, 1}, nullptr);
      if (pager.fault(i, access.write, moved) == Pager::Fault::kRefused)
        return {Code::kOutOfDeviceMemory, "no frame can be had for a page that faulted"};
      g_device->book_fault(moved);
    }
    pager.touched(i);
  }
  return {};
}

// The contents remain. Without the lock: the fault handler takes it.
void touch(const Access& access) {
  for (std::uintptr_t at = access.ptr; at < access.ptr + access.bytes;
       at = align_down(at, kPageBytes) + kPageBytes) {
    auto* byte = reinterpret_cast<unsigned char*>(at);
    if (access.write) {
      __atomic_fetch_or(byte, 0, __ATOMIC_RELAXED);
    } else {
      (void)__atomic_load_n(byte, __ATOMIC_RELAXED);
    }
  }
}

}  // namespace

Status access(const Access* list, std::size_t count) {
  {
    DeviceLock lock;
    if (!g_device) return {Code::kBadState, "no software device is open"};
    if (g_unbacked) {
      for (std::size_t i = 0; i < count; ++i) UMEM_RETURN_IF_ERROR(fault_in(list[i]));
      g_device->log.end_operation();
      return {};
    }
    for (std::size_t i = 0; i < count; ++i)
      if (list[i].bytes > 0 && g_device->pager.find(list[i].ptr).count == 0)
        return {Code::kInvalidArgument, "an access to memory that is not allocated"};
  }
  for (std::size_t i = 0; i < count; ++i) touch(list[i]);
  return {};
}

double arrived_us() {
  DeviceLock lock;
  return g_device ? g_device->clock.arrived_us() : 0;
}

Status host_work(std::uintptr_t ptr, std::size_t bytes, double ready_us, double us, double due) {
  DeviceLock lock;
  if (!g_device) return {Code::kBadState, "no software device is open"};
  const Pager::Extent pages = managed_part(reinterpret_cast<const void*>(ptr), bytes);
  for (std::size_t i = pages.first; i < pages.first + pages.count; ++i)
    if (const PageState state = g_device->pager.page(i).state; state != PageState::kHost)
      return {Code::kInvalidArgument, "work of the host on memory that is not there"};
  if (pages.count == 0)
    return {Code::kInvalidArgument, "work of the host on memory that is not managed"};
  const auto work = static_cast<std::uint32_t>(g_device->clock.host().add(ready_us, us, due));
  for (std::size_t i = pages.first; i < pages.first + pages.count; ++i)
    g_device->pager.page(i).work = work + 1;
  g_device->log.note_work(pages.first, static_cast<std::uint32_t>(pages.count), work, us);
  return {};
}

Status log_moves() {
  DeviceLock lock;
  if (!g_device) return {Code::kBadState, "no software device is open"};
  if (!g_unbacked)
    return {Code::kNotSupported, "moves are logged on a device without memory behind it only"};
  g_device->log.start();
  g_device->pager.note_held();
  return {};
}

Result<Moves> take_moves() {
  DeviceLock lock;
  if (!g_device) return Status(Code::kBadState, "no software device is open");
  if (!g_device->log.on()) return Status(Code::kBadState, "no moves are logged; call log_moves");
  return Moves{g_device->pager.space().managed(0), g_device->log.take()};
}

Status settle_host(std::vector<Move>& moves) {
  DeviceLock lock;
  if (!g_device) return {Code::kBadState, "no software device is open"};
  for (Move& move : moves) {
    if (move.kind != MoveKind::kHost) continue;
    move.end_us = g_device->clock.host().end_of(move.work);
    move.start_us = move.end_us - move.work_us;
  }
  return {};
}

void wait() {
  DeviceLock lock;
  if (g_device) g_device->clock.synchronize(static_cast<cu::CUstream>(nullptr));
}

double now_us() {
  DeviceLock lock;
  return g_device ? g_device->clock.host_us() : 0;
}

void set_poison(bool on) {
  DeviceLock lock;
  if (g_device) g_device->pager.set_poison(on);
}

Result<std::vector<PageState>> page_states(std::uintptr_t ptr, std::size_t bytes) {
  DeviceLock lock;
  if (!g_device) return Status(Code::kBadState, "no software device is open");
  const Pager::Extent extent = managed_part(reinterpret_cast<const void*>(ptr), bytes);
  if (extent.count == 0) return Status(Code::kInvalidArgument, "the address is not managed memory");
  std::vector<PageState> states;
  for (std::size_t i = extent.first; i < extent.first + extent.count; ++i)
    states.push_back(g_device->pager.page(i).state);
  return states;
}

}  // namespace umem::soft
