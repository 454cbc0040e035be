#include "driver/table.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/process_limits.h"

namespace umem::driver {
namespace {

constexpr std::size_t kEntries = static_cast<std::size_t>(Entry::kCount);

constexpr std::array<Symbol, kEntries> kSymbols{{
#define UMEM_SYMBOL(name, version, params) {#name, version},
#include "driver/symbols.def"
#undef UMEM_SYMBOL
}};

constexpr std::size_t index_of(Entry entry) {
  return static_cast<std::size_t>(entry);
}

struct Injection {
  std::uint64_t call;  // counted since `instrument`
  CUresult error;
  bool torn;
};

// One entry point's counter and planned failures. With `armed` a call without a planned failure
// costs two relaxed atomics and no lock.
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

// Functions generated for one entry point from the type of its table slot. `entry` is part of the
// type so that two entry points of one signature do not share `target`.
template <Entry entry, class Function>
struct Generated;

template <Entry entry, class... Params>
struct Generated<entry, CUresult (*)(Params...)> {
  using Function = CUresult (*)(Params...);

  static CUresult missing(Params...) { return CUDA_ERROR_NOT_FOUND; }

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
    target = slot == nullptr ? &missing : slot;
    slot = &counted;
  }

  static bool present(Function slot) {
    const Function called = slot == &counted ? target : slot;
    return called != nullptr && called != &missing;
  }

  static inline Function target = &missing;
};

const char* named(CUresult result) {
  const char* name = error_name(result);
  return name ? name : "an error that umem has no name for";
}

Code code_of(CUresult result) {
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return Code::kOutOfDeviceMemory;
    case CUDA_ERROR_OPERATING_SYSTEM:
      return Code::kOutOfHostMemory;
    case CUDA_ERROR_NOT_FOUND:
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NO_DEVICE:
      return Code::kNotSupported;
    default:
      return Code::kDriver;
  }
}

}  // namespace

const char* error_name(CUresult result) {
  switch (result) {
#define UMEM_NAME(error) \
  case error:            \
    return #error
    UMEM_NAME(CUDA_SUCCESS);
    UMEM_NAME(CUDA_ERROR_INVALID_VALUE);
    UMEM_NAME(CUDA_ERROR_OUT_OF_MEMORY);
    UMEM_NAME(CUDA_ERROR_NOT_INITIALIZED);
    UMEM_NAME(CUDA_ERROR_DEINITIALIZED);
    UMEM_NAME(CUDA_ERROR_NO_DEVICE);
    UMEM_NAME(CUDA_ERROR_INVALID_DEVICE);
    UMEM_NAME(CUDA_ERROR_INVALID_CONTEXT);
    UMEM_NAME(CUDA_ERROR_INVALID_HANDLE);
    UMEM_NAME(CUDA_ERROR_NOT_FOUND);
    UMEM_NAME(CUDA_ERROR_NOT_READY);
    UMEM_NAME(CUDA_ERROR_OPERATING_SYSTEM);
    UMEM_NAME(CUDA_ERROR_ILLEGAL_ADDRESS);
    UMEM_NAME(CUDA_ERROR_LAUNCH_FAILED);
    UMEM_NAME(CUDA_ERROR_NOT_PERMITTED);
    UMEM_NAME(CUDA_ERROR_NOT_SUPPORTED);
    UMEM_NAME(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    UMEM_NAME(CUDA_ERROR_UNKNOWN);
#undef UMEM_NAME
  }
  return nullptr;
}

const Symbol& symbol(Entry entry) {
  static constexpr Symbol kUnknown{"(no entry point)", 0};
  return entry < Entry::kCount ? kSymbols[index_of(entry)] : kUnknown;
}

Entry find_entry(std::string_view name) {
  const auto found = std::find_if(kSymbols.begin(), kSymbols.end(),
                                  [name](const Symbol& s) { return name == s.name; });
  return static_cast<Entry>(found - kSymbols.begin());
}

void fill_missing(Table& table) {
#define UMEM_SYMBOL(name, version, params) \
  if (table.name == nullptr) table.name = &Generated<Entry::name, decltype(Table::name)>::missing;
#include "driver/symbols.def"
#undef UMEM_SYMBOL
}

bool supports(const Table& table, Entry entry) {
  switch (entry) {
#define UMEM_SYMBOL(name, version, params) \
  case Entry::name:                        \
    return Generated<Entry::name, decltype(Table::name)>::present(table.name);
#include "driver/symbols.def"
#undef UMEM_SYMBOL
    case Entry::kCount:
      break;
  }
  return false;
}

void instrument(Table& table) {
  clear_injections();
  for (Probe& probe : probes) probe.calls.store(0, std::memory_order_relaxed);
#define UMEM_SYMBOL(name, version, params) \
  Generated<Entry::name, decltype(Table::name)>::wrap(table.name);
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

Status check(CUresult result, Entry entry) {
  if (result == CUDA_SUCCESS) [[likely]]
    return Status();
  std::string message = std::string(symbol(entry).name) + " failed: " + named(result) + " (" +
                        std::to_string(static_cast<int>(result)) + ")";
  if (result == CUDA_ERROR_NOT_FOUND) {
    const int version = symbol(entry).version;
    message += "; the driver has no such entry point, which came with CUDA " +
               std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  }
  if (result == CUDA_ERROR_OPERATING_SYSTEM) {
    char limit[160];
    message += std::string("; ") + describe_reached_limit(limit, sizeof limit);
  }
  return Status(code_of(result), std::move(message));
}

}  // namespace umem::driver
