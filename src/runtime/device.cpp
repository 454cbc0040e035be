#include "runtime/device.h"

namespace umem::runtime {

Device::Device(driver::Driver& driver, managed::RangeTable& ranges, driver::Place at, bool managed,
               const policy::Policy& policy, void (*release_cached)(Device&))
    : place(at),
      freer(
          driver.table, at, [this](std::uint64_t after) { engine.wait_issued(after); },
          [&ranges](std::uintptr_t raw) { return ranges.release(raw); },
          [&ranges, at](std::size_t bytes) { ranges.freed(bytes, at.device); }),
      arena(driver.table, ranges, at, at.context ? &freer : nullptr),
      engine(driver.table, ranges, at, managed, policy,
             [this, release_cached] { release_cached(*this); }) {}

}  // namespace umem::runtime
