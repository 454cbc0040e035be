#include "devices.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "config.h"
#include "soft/device.h"
#include "soft/rules.h"
#include "soft/state.h"
#include "softcuda.h"
#include "work.h"

namespace softcuda {
namespace {

using umem::kPageShift;
using umem::soft::PageState;

constexpr int kMaxDevices = 2;

struct State {
  std::mutex mutex;
  umem::driver::Driver driver;
  std::map<std::uintptr_t, Allocation> allocations;
  std::array<int, kMaxDevices> references{};
  std::array<int, kMaxDevices> context_tags{};
};
State& state() {
  static auto* instance = new State;
  return *instance;
}
std::atomic<bool> g_initialized{false};
std::atomic<int> g_visible{-1};  // -1: not initialized
thread_local int t_device = -1;

bool has_frame(const umem::soft::Page& page) {
  return page.attached || page.state == PageState::kDevice || page.state == PageState::kDuplicate ||
         page.state == PageState::kDiscarded;
}

// A managed page is on the device that it was last prefetched to, or else allocated for.
int home_of(const umem::soft::Page& page, const Allocation& owner) {
  return page.last_prefetch >= 0 ? page.last_prefetch : owner.device;
}

// Calls visit(page index, page) for each managed page that has a frame of `device`.
template <class Visit>
void for_framed(int device, Visit visit) {
  auto& pager = umem::soft::g_device->pager;
  for (const auto& [base, allocation] : state().allocations) {
    if (allocation.kind != Kind::kManaged) continue;
    const std::size_t first = pager.space().page_of(base);
    const std::size_t count = umem::pages_of(allocation.bytes);
    for (std::size_t i = first; i < first + count; ++i) {
      const auto& page = pager.page(i);
      if (has_frame(page) && home_of(page, allocation) == device) visit(i, page);
    }
  }
}

std::size_t used_locked(int device, std::size_t batch) {
  std::size_t used = 0;
  for (const auto& [base, allocation] : state().allocations)
    if (allocation.kind == Kind::kDevice && allocation.device == device && !allocation.mapped)
      used += umem::pages_of(allocation.bytes) << kPageShift;
  std::size_t frames = 0;
  for_framed(device, [&](std::size_t, const umem::soft::Page&) { ++frames; });
  // The driver takes frames for managed memory from the machine in batches, while there are any.
  frames = (frames + batch - 1) / batch * batch;
  return std::min(config().bytes, used + (frames << kPageShift));
}

// Devices that CUDA_VISIBLE_DEVICES leaves, which the driver reads once: in cuInit. Which ones they
// are makes no difference here.
int visible_devices() {
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!text) return config().devices;
  std::set<int> seen;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    char* end = nullptr;
    const long device = std::strtol(word.c_str(), &end, 10);
    if (end == word.c_str() || *end || device < 0 || device >= config().devices) break;
    seen.insert(static_cast<int>(device));
  }
  return static_cast<int>(seen.size());
}

// After src/soft's own, so that the locks are taken in their order: work, devices, src/soft.
void register_fork_handlers() {
  const auto release = [] {
    state().mutex.unlock();
    unlock_after_fork();
  };
  pthread_atfork(
      [] {
        lock_for_fork();
        state().mutex.lock();
      },
      release,
      [] {
        g_initialized = false;  // as on a real driver: the child cannot use what the parent started
        state().mutex.unlock();
        unlock_after_fork();
      });
}

}  // namespace

CUresult initialize() {
  static std::mutex mutex;
  const std::lock_guard guard(mutex);
  if (g_initialized) return g_visible > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
  umem::soft::Options options;
  options.device_bytes = config().bytes * static_cast<std::size_t>(config().devices);
  options.profile = umem::soft::find_profile("a100-pcie4");
  options.uvm = config().uvm;
  if (const umem::Status status = umem::soft::open(options, state().driver); !status.ok()) {
    std::fprintf(stderr, "softcuda: %s\n", status.message().c_str());
    return CUDA_ERROR_NOT_INITIALIZED;
  }
  umem::soft::set_poison(true);
  register_fork_handlers();
  g_visible = visible_devices();
  g_initialized = true;
  return g_visible > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult check_initialized() {
  return g_initialized ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

const umem::driver::Table& soft() {
  return state().driver.table;
}

int current_device() {
  return t_device;
}
void set_current_device(int device) {
  t_device = device;
}
CUcontext context_of(int device) {
  return valid_device(device)
             ? reinterpret_cast<CUcontext>(&state().context_tags[static_cast<std::size_t>(device)])
             : nullptr;
}
int device_of(CUcontext context) {
  for (int device = 0; device < device_count(); ++device)
    if (context == context_of(device)) return device;
  return -1;
}
int device_count() {
  return g_visible >= 0 ? g_visible.load() : config().devices;
}
bool valid_device(int device) {
  return device >= 0 && device < device_count();
}
int retain(int device, int change) {
  const std::lock_guard guard(state().mutex);
  int& count = state().references[static_cast<std::size_t>(device)];
  count = std::max(0, count + change);
  return count;
}

bool find_allocation(std::uintptr_t address, Allocation& found) {
  const std::lock_guard guard(state().mutex);
  auto after = state().allocations.upper_bound(address);
  if (after == state().allocations.begin()) return false;
  const Allocation& candidate = std::prev(after)->second;
  if (address - candidate.base >= candidate.bytes) return false;
  found = candidate;
  return true;
}
void add_allocation(const Allocation& allocation) {
  const std::lock_guard guard(state().mutex);
  state().allocations[allocation.base] = allocation;
}
void remove_allocation(std::uintptr_t base) {
  const std::lock_guard guard(state().mutex);
  state().allocations.erase(base);
}
bool is_managed(CUdeviceptr ptr, std::size_t bytes) {
  Allocation found;
  if (bytes == 0 || !find_allocation(ptr, found) || found.kind != Kind::kManaged) return false;
  return umem::soft::inside(ptr, bytes, found.base, found.bytes);
}

std::size_t used_bytes(int device) {
  const std::lock_guard guard(state().mutex);
  umem::soft::DeviceLock lock;
  return used_locked(device, config().batch_frames);
}

std::size_t make_room(int device, std::size_t bytes) {
  if (config().devices == 1) return bytes;
  const std::lock_guard guard(state().mutex);
  umem::soft::DeviceLock lock;
  const std::size_t used = used_locked(device, 1);  // the rest of a batch is taken first
  if (used + bytes <= config().bytes) return bytes;
  std::size_t missing = umem::pages_of(used + bytes - config().bytes);
  std::vector<std::size_t> unused, victims;
  for_framed(device, [&](std::size_t i, const umem::soft::Page& page) {
    (page.attached ? unused : victims).push_back(i);
  });
  unused.insert(unused.end(), victims.begin(), victims.end());
  umem::soft::Moved moved;
  for (const std::size_t i : unused)
    if (missing > 0 && umem::soft::g_device->pager.take_from(i, moved)) --missing;
  return bytes - std::min(bytes, missing << kPageShift);
}

void set_home(CUdeviceptr ptr, std::size_t bytes, int device) {
  umem::soft::DeviceLock lock;
  auto& pager = umem::soft::g_device->pager;
  const std::size_t first = pager.space().page_of(ptr);
  const std::size_t last = pager.space().page_of(ptr + bytes - 1);
  for (std::size_t i = first; i <= last; ++i)
    pager.page(i).last_prefetch = static_cast<std::int8_t>(device);
}

}  // namespace softcuda

std::uint64_t softcuda_faults() {
  const auto& driver = softcuda::state().driver;
  return driver.telemetry ? driver.telemetry().faults : 0;
}
int softcuda_device_count() {
  return softcuda::device_count();
}
std::size_t softcuda_device_bytes() {
  return softcuda::config().bytes;
}
bool softcuda_is_device_pointer(const void* ptr, bool* managed) {
  softcuda::Allocation found;
  if (!softcuda::find_allocation(reinterpret_cast<std::uintptr_t>(ptr), found)) return false;
  const bool mapped_host = found.mapped && found.kind == softcuda::Kind::kHost;
  if (managed) *managed = found.kind == softcuda::Kind::kManaged || mapped_host;
  return found.kind != softcuda::Kind::kHost || mapped_host;
}
