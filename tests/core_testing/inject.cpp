#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <optional>
#include <vector>

#include "core_testing/testing.h"

namespace umem::driver {
namespace {

constexpr std::size_t kEntries = static_cast<std::size_t>(Entry::kCount);

constexpr std::size_t index_of(Entry entry) {
  return static_cast<std::size_t>(entry);
}

struct Injection {
  std::uint64_t call;  // counted since `instrument`
  CUresult error;
  bool torn;
};

// One entry point's counter and its planned failures. `armed` lets a call without a planned
// failure pass with two relaxed atomics and no lock.
struct Probe {
  std::atomic<std::uint64_t> calls{0};
  std::atomic<bool> armed{false};
  std::vector<Injection> injections;  // under `injections_mutex`
};

std::array<Probe, kEntries> probes;
std::mutex injections_mutex;

std::optional<Injection> planned(Probe& probe, std::uint64_t call) {
  const std::lock_guard<std::mutex> guard(injections_mutex);
  const auto found = std::find_if(probe.injections.begin(), probe.injections.end(),
                                  [call](const Injection& i) { return i.call == call; });
  if (found == probe.injections.end()) return {};
  const Injection injection = *found;
  probe.injections.erase(found);
  probe.armed.store(!probe.injections.empty(), std::memory_order_release);
  return injection;
}

// A wrapper of one entry point, from the type of its table slot. `entry` is part of the type so
// that two entry points of one signature do not share `target`.
template <Entry entry, class Function>
struct Wrapper;

template <Entry entry, class... Params>
struct Wrapper<entry, CUresult (*)(Params...)> {
  using Function = CUresult (*)(Params...);

  static CUresult counted(Params... params) {
    Probe& probe = probes[index_of(entry)];
    const std::uint64_t call = probe.calls.fetch_add(1, std::memory_order_relaxed) + 1;
    if (probe.armed.load(std::memory_order_acquire)) [[unlikely]] {
      if (const auto injection = planned(probe, call)) {
        if (injection->torn) run_half(params...);
        return injection->error;
      }
    }
    return target(params...);
  }

  template <class... Rest>
  static void run_half(CUdeviceptr* ptrs, std::size_t* sizes, std::size_t count, Rest... rest) {
    if (count > 1) (void)target(ptrs, sizes, count / 2, rest...);
  }
  static void run_half(...) {}  // no batch

  static void wrap(Function& slot) {
    if (slot == &counted) return;  // wrapping the wrapper would recurse forever
    target = slot;
    slot = &counted;
  }

  static inline Function target = nullptr;
};

}  // namespace

void instrument(Table& table) {
  clear_injections();
  for (Probe& probe : probes) probe.calls.store(0, std::memory_order_relaxed);
#define UMEM_SYMBOL(name, version, params) \
  if (supports(table, Entry::name)) Wrapper<Entry::name, decltype(Table::name)>::wrap(table.name);
#include "driver/symbols.def"
#undef UMEM_SYMBOL
}

void inject(Entry entry, std::uint64_t nth_call, CUresult error, bool torn) {
  if (entry >= Entry::kCount || nth_call == 0 || error == CUDA_SUCCESS) return;
  Probe& probe = probes[index_of(entry)];
  const std::lock_guard<std::mutex> guard(injections_mutex);
  const std::uint64_t call = probe.calls.load(std::memory_order_relaxed) + nth_call;
  probe.injections.push_back({call, error, torn});
  probe.armed.store(true, std::memory_order_release);
}

void clear_injections() {
  const std::lock_guard<std::mutex> guard(injections_mutex);
  for (Probe& probe : probes) {
    probe.injections.clear();
    probe.armed.store(false, std::memory_order_release);
  }
}

std::uint64_t calls(Entry entry) {
  if (entry >= Entry::kCount) return 0;
  return probes[index_of(entry)].calls.load(std::memory_order_relaxed);
}

}  // namespace umem::driver
