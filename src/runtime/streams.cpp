#include "runtime/streams.h"

#include <optional>
#include <string>

#include "runtime/device_lock.h"
#include "runtime/devices.h"
#include "runtime/state.h"

namespace umem::runtime {

using driver::check;
using driver::Entry;

// For streams of libraries other than torch, the driver is asked each time.
bool stream_captures(int device, std::uintptr_t stream) {
  State& s = state();
  if (!s.accepting || s.forked || !State::has_slot(device)) return false;
  DeviceLock lock(s.slot(device));
  if (!ensure_open(s, lock, device).ok()) return false;  // the next allocation reports the error
  const driver::CallScope scope(s.driver.table, lock.device()->place);
  return driver::capturing(s.driver.table, lock.device()->place,
                           reinterpret_cast<cu::CUstream>(stream));
}

Status wait_stream(int device, std::uintptr_t waiter, std::uintptr_t on) {
  State& s = state();
  std::optional<DeviceLock> lock;
  if (State::has_slot(device)) lock.emplace(s.slot(device));
  const Device* opened = s.open() && lock ? lock->device() : nullptr;
  if (!opened) return {Code::kBadState, "umem holds no memory on device " + std::to_string(device)};
  if (s.driver.kind == driver::Kind::kSoft || waiter == on) return {};
  const driver::Table& table = s.driver.table;
  const driver::Place& place = opened->place;
  const driver::CallScope scope(table, place);
  for (std::uintptr_t stream : {waiter, on})
    if (driver::capturing(table, place, reinterpret_cast<cu::CUstream>(stream)))
      return {Code::kBadState,
              "a CUDA graph is captured on one of the two streams; hand the memory over before"};
  cu::CUevent event = nullptr;
  UMEM_RETURN_IF_ERROR(
      check(table.cuEventCreate(&event, cu::CU_EVENT_DISABLE_TIMING), Entry::cuEventCreate));
  FirstError error;
  error.keep(
      check(table.cuEventRecord(event, reinterpret_cast<cu::CUstream>(on)), Entry::cuEventRecord));
  error.keep(check(table.cuStreamWaitEvent(reinterpret_cast<cu::CUstream>(waiter), event, 0),
                   Entry::cuStreamWaitEvent));
  error.keep(check(table.cuEventDestroy(event), Entry::cuEventDestroy));
  return error.take();
}

}  // namespace umem::runtime
