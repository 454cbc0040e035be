#include "runtime/settle.h"

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

// Holds no lock while it waits: the work may be that of a thread that needs it.
Status wait_for_moves(State& s, DeviceLock& lock) {
  engine::Engine& engine = lock.device()->engine;
  const engine::Ticket last = engine.last_departure();
  Status synchronized;
  lock.without([&] {
    engine.wait_issued(last);
    const driver::CallScope scope(s.driver.table, lock.device()->place);
    synchronized =
        driver::check(s.driver.table.cuCtxSynchronize(), driver::Entry::cuCtxSynchronize);
  });
  return synchronized;
}

Status settle(State& s, DeviceLock& lock) {
  UMEM_RETURN_IF_ERROR(wait_for_moves(s, lock));
  return release_all_cached(lock);
}

}  // namespace umem::runtime
