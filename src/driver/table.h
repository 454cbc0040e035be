// One table of function pointers separates umem from every driver, real or software.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/export.h"
#include "base/status.h"
#include "driver/types.h"

namespace umem::driver {

using namespace umem::cu;  // NOLINT: the table is written in the driver's own vocabulary

enum class Entry : int {
#define UMEM_SYMBOL(name, version, params) name,
#include "driver/symbols.def"
#undef UMEM_SYMBOL
  kCount
};

// Every pointer is callable at all times: a symbol that the driver lacks is a function that
// returns CUDA_ERROR_NOT_FOUND.
struct Table {
#define UMEM_SYMBOL(name, version, params) CUresult(*name) params = nullptr;
#include "driver/symbols.def"
#undef UMEM_SYMBOL
};

struct Symbol {
  const char* name;
  int version;
};
UMEM_API const Symbol& symbol(Entry entry);
// Entry::kCount when no entry point has this name.
UMEM_API Entry find_entry(std::string_view name);

// The transfers of evicted pages to and from a disk.
struct DiskCounters {
  std::uint64_t bytes_in = 0, bytes_out = 0;
  std::uint64_t busy_in_us = 0, busy_out_us = 0;  // at least one transfer of this direction ran
  std::uint64_t wait_us = 0;                      // the program waited for transfers or frames
  std::uint64_t open_us = 0;                      // since the disk is in use
  std::uint64_t file_bytes = 0;                   // reserved
};

// Counters of a software device only; a real driver lacks them.
struct Telemetry {
  std::uint64_t faults = 0;              // fault groups: one a page
  std::uint64_t bytes_in = 0;            // host -> device as requested (prefetch)
  std::uint64_t bytes_out = 0;           // device -> host as requested
  std::uint64_t fault_bytes_in = 0;      // host -> device by faults
  std::uint64_t pressure_bytes_out = 0;  // device -> host because a faulting page needed a frame
  std::uint64_t resident_bytes = 0;      // in device frames, but for discarded pages
  std::uint64_t peak_resident_bytes = 0;
  std::uint64_t host_bytes = 0;  // host backing held (never shrinks before a free)
  std::uint64_t peak_host_bytes = 0;
  // Time that compute waited for data: virtual, or real if evicted pages are on a disk.
  std::uint64_t stall_us = 0;
  DiskCounters disk;
};

// The page faults of one operation of the program.
struct Operation {
  std::uint64_t faults = 0;
  std::size_t thrashed_bytes = 0;  // on pages that faulted repeatedly, and remained on the host
};

enum class Kind { kSoft, kCuda };

// An open driver. `telemetry` is null for a real one.
struct Driver {
  Kind kind = Kind::kSoft;
  Table table;
  Telemetry (*telemetry)() = nullptr;
  void (*reset_peak)() = nullptr;
  Status (*resize)(std::size_t device_bytes) = nullptr;  // null where the size is fixed
  // An operation of the program ends, and the next begins. Null: no counting.
  Operation (*end_operation)() = nullptr;
  // The device's free memory becomes this machine's, once transfers have ended. Null: it is the
  // device's own.
  void (*give_back)() = nullptr;
  // The contents of managed memory become `bytes` of a file, at `offset`, which is read when they
  // are needed. kNotSupported or null where there is no disk.
  Status (*place_in_file)(std::uintptr_t ptr, std::size_t bytes, const std::string& path,
                          std::uint64_t offset) = nullptr;
  // The folder of the file that evicted memory is in; empty: it is in this machine's memory.
  std::string disk = {};
};

// Fills empty pointers of `table` with functions that return CUDA_ERROR_NOT_FOUND.
void fill_missing(Table& table);
// True if the driver has the entry point.
UMEM_API bool supports(const Table& table, Entry entry);

// "CUDA_ERROR_…"; null for a code that umem does not know.
const char* error_name(CUresult result);
// Ok for CUDA_SUCCESS; otherwise a Status naming the call and the driver's error.
Status check(CUresult result, Entry entry);

}  // namespace umem::driver
