#include "runtime/settle.h"

#include <utility>

#include "runtime/cache.h"

namespace umem::runtime {

Status wait_until_freed(DeviceLock& lock) {
  Device& device = *lock.device();
  if (!device.frees_on_thread()) return {};
  Status status;
  lock.without([&] { status = device.freer.wait(); });
  return status;
}

Status release_all_cached(DeviceLock& lock) {
  retire_reclaimed(*lock.device());
  lock.device()->engine.finish_retired();
  UMEM_RETURN_IF_ERROR(trim_cache(*lock.device(), 0));
  return wait_until_freed(lock);
}

Status settle(State& s, DeviceLock& lock) {
  Device& device = *lock.device();
  Status synchronized;
  lock.without([&] {
    const driver::CallScope scope(s.driver.table, device.place);
    synchronized =
        driver::check(s.driver.table.cuCtxSynchronize(), driver::Entry::cuCtxSynchronize);
  });
  UMEM_RETURN_IF_ERROR(std::move(synchronized));
  return release_all_cached(lock);
}

}  // namespace umem::runtime
