#include "runtime/sleep.h"

#include <algorithm>
#include <atomic>

#include "driver/memory_info.h"
#include "runtime/settle.h"

namespace umem::runtime {
namespace {

Status check_sleep(State& s, const engine::SleepRequest& wanted) {
  if (!s.usable()) return not_running(s);
  if (s.captures > 0)
    return {Code::kBadState, "a CUDA graph is being captured; sleep after its end"};
  FirstError error;
  each_device(s, [&](Device& device) { error.keep(device.engine.sleep().check(wanted)); });
  return error.take();
}

std::size_t held_bytes(const Device& device) {
  const residency::Ledger& ledger = device.engine.ledger();
  return ledger.resident_bytes() + ledger.dropped_bytes();
}

constexpr std::size_t kPulseBytes = 256 * MiB;
// A pulse leaves this much to kernels that run meanwhile: a page fault takes device memory from
// another page, and finds none if plain memory has everything.
constexpr std::size_t kSpareBytes = 16 * MiB;

// Allocates `bytes` of device memory in pieces and frees them. False: there was not enough.
bool take_and_give_back(const driver::Table& table, std::size_t bytes) {
  std::vector<cu::CUdeviceptr> taken;
  bool ok = true;
  for (std::size_t left = bytes; ok && left > 0; left -= std::min(left, kPulseBytes)) {
    cu::CUdeviceptr piece = 0;
    ok = table.cuMemAlloc(&piece, std::min(left, kPulseBytes)) == cu::CUDA_SUCCESS;
    if (ok) taken.push_back(piece);
  }
  for (cu::CUdeviceptr piece : taken) ok = table.cuMemFree(piece) == cu::CUDA_SUCCESS && ok;
  return ok;
}

// A driver keeps device memory for evicted addresses until it needs the memory. Allocating the free
// memory plus that much makes the driver take it without a copy, and freeing the allocation leaves
// it free, except for kSpareBytes. Not done under the guard, which never lets all free memory be
// taken. False: the memory is not free yet, but whoever allocates gets it.
bool release_unused(State& s, DeviceLock& lock) {
  engine::Engine& engine = lock.device()->engine;
  if (s.driver.give_back) s.driver.give_back();
  if (s.driver.kind == driver::Kind::kSoft || !engine.managed()) return true;
  // With the policy `none`, it is unknown which memory is without contents.
  if (s.options.guard || s.captures > 0 || !engine.active()) return false;
  const driver::Table& table = s.driver.table;
  Result<driver::MemoryInfo> memory = driver::memory_info(table, lock.device()->place);
  if (!memory.ok()) return false;
  const std::size_t free_bytes = memory.value().free_bytes;
  engine.observe_memory(free_bytes);
  const std::size_t unused = engine.unused_bytes();
  if (unused == 0) return true;
  // If nothing is resident, a refused allocation means that all of it was taken.
  bool all = false;
  lock.without([&] {
    const driver::CallScope scope(table, lock.device()->place);
    const std::size_t most = free_bytes + unused;
    all = take_and_give_back(table, most - std::min(most, kSpareBytes));
  });
  if (!all && engine.ledger().resident_bytes() > 0) return false;
  engine.forget_unused();
  return true;
}

Status sleep_on(State& s, DeviceLock& lock, const engine::SleepRequest& wanted, Slept* slept) {
  // No stream uses the bytes to be discarded then, and the cache takes no host memory.
  Device& device = *lock.device();
  const std::size_t before = held_bytes(device);
  UMEM_RETURN_IF_ERROR(settle(s, lock));
  slept->bytes += before - std::min(before, held_bytes(device));
  UMEM_RETURN_IF_ERROR(device.engine.sleep().check(wanted));  // the lock was released meanwhile
  std::size_t bytes = 0;
  UMEM_RETURN_IF_ERROR(device.engine.sleep().begin(wanted, bytes));
  slept->bytes += bytes;
  UMEM_RETURN_IF_ERROR(wait_for_moves(s, lock));
  Status moved = device.engine.sleep().finish();
  const driver::CallScope scope(s.driver.table, device.place);
  slept->released = moved.ok() && release_unused(s, lock) && slept->released;
  return moved;
}

}  // namespace

Status sleep(std::uint32_t tags, bool discard, Slept* slept) {
  static std::atomic<std::uint64_t> numbers{0};
  State& s = state();
  engine::SleepRequest wanted{tags, discard, 0};
  UMEM_RETURN_IF_ERROR(check_sleep(s, wanted));
  wanted.number = ++numbers;
  *slept = {wanted.number, 0, true};
  FirstError error;
  each_lock(s, [&](DeviceLock& lock) { error.keep(sleep_on(s, lock, wanted, slept)); });
  return error.take();
}

Status wake(std::uint32_t tags, std::uint64_t number, std::size_t* bytes) {
  State& s = state();
  *bytes = 0;
  if (!s.usable()) return not_running(s);
  if (s.captures > 0)
    return {Code::kBadState, "a CUDA graph is being captured; wake after its end"};
  FirstError error;
  each_device(s, [&](Device& device) {
    std::size_t back = 0;
    error.keep(device.engine.sleep().wake(tags, number, back));
    *bytes += back;
  });
  return error.take();
}

}  // namespace umem::runtime
