#include "runtime/transfer_log.h"

#include "runtime/device_lock.h"

namespace umem::runtime {

Status start_transfer_log() {
  State& s = state();
  if (!s.usable()) return {};
  s.logs_transfers = true;
  FirstError error;
  each_lock(s, [&](DeviceLock& lock) {
    engine::Engine& engine = lock.device()->engine;
    lock.without([&] { error.keep(engine.start_log()); });  // waits for the driver
  });
  return error.take();
}

std::vector<LoggedTransfer> take_transfer_log(std::size_t* left_out) {
  State& s = state();
  s.logs_transfers = false;
  *left_out = 0;
  std::vector<LoggedTransfer> all;
  each_lock(s, [&](DeviceLock& lock) {
    Device& device = *lock.device();
    std::vector<engine::Transfer> taken;
    lock.without([&] { taken = device.engine.take_log(*left_out); });
    for (const engine::Transfer& each : taken)
      all.push_back(
          {device.place.device, engine::name(each.verb), each.bytes, each.begin_ns, each.end_ns});
  });
  return all;
}

}  // namespace umem::runtime
