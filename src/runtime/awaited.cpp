#include "runtime/awaited.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <utility>

namespace umem::runtime {
namespace {

// Never destroyed: ops run while the process ends.
struct Awaited {
  std::shared_mutex mutex;
  std::vector<const void*> storages;  // sorted
  Arrive arrive = nullptr;
};
Awaited& awaited() {
  static auto* one = new Awaited;
  return *one;
}

std::atomic<bool> g_any{false};

}  // namespace

void set_awaited(std::vector<const void*> storages, Arrive arrive) {
  std::sort(storages.begin(), storages.end(), std::less<>());
  Awaited& a = awaited();
  const std::unique_lock lock(a.mutex);
  a.storages = std::move(storages);
  a.arrive = arrive;
  g_any = !a.storages.empty();
}

std::vector<const void*> awaited_storages() {
  Awaited& a = awaited();
  const std::shared_lock lock(a.mutex);
  return a.storages;
}

bool awaiting() noexcept {
  return g_any.load(std::memory_order_relaxed);
}

void await_contents(const Input* inputs, std::size_t count) {
  std::vector<const void*> found;
  Arrive arrive = nullptr;
  {
    Awaited& a = awaited();
    const std::shared_lock lock(a.mutex);
    arrive = a.arrive;
    for (std::size_t i = 0; i < count; ++i)
      if (std::binary_search(a.storages.begin(), a.storages.end(), inputs[i].storage,
                             std::less<>()))
        found.push_back(inputs[i].storage);
  }
  for (const void* storage : found) arrive(storage);
}

}  // namespace umem::runtime
