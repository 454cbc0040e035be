#include "driver/table.h"

#include <algorithm>
#include <array>
#include <utility>

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

template <class Function>
struct Missing;

template <class... Params>
struct Missing<CUresult (*)(Params...)> {
  static CUresult call(Params...) { return CUDA_ERROR_NOT_FOUND; }
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
  if (table.name == nullptr) table.name = &Missing<decltype(Table::name)>::call;
#include "driver/symbols.def"
#undef UMEM_SYMBOL
}

bool supports(const Table& table, Entry entry) {
  switch (entry) {
#define UMEM_SYMBOL(name, version, params) \
  case Entry::name:                        \
    return table.name != nullptr && table.name != &Missing<decltype(Table::name)>::call;
#include "driver/symbols.def"
#undef UMEM_SYMBOL
    case Entry::kCount:
      break;
  }
  return false;
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
