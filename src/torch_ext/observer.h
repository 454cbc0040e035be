// The op observer: reports to the runtime each operator's reads, writes and purpose.
#pragma once
#include <cstdint>

namespace umem::torch_ext {

// Both may be called twice; the second call does nothing.
void install_observer();
void remove_observer();
bool observer_installed();

struct ObserverCounters {
  std::uint64_t ops = 0;      // reported to the runtime
  std::uint64_t ignored = 0;  // views and foreign ranges
  std::uint64_t inputs = 0;   // storages read by those ops
};
// Sum over all threads since the process began.
ObserverCounters observer_counters();

}  // namespace umem::torch_ext
