// Options of the native side at start. Parsed and checked by umem/config/settings.py, the only
// reader of the environment.
#pragma once
#include <algorithm>
#include <cstddef>
#include <string>

#include "base/units.h"

namespace umem {

struct Options {
  std::string device = "soft";         // "soft" | "cuda"
  std::string profile = "h200-pcie5";  // profile of the software device
  // Frames of the software device; 0: as many as the budget. A GPU is made that small; 0: whole.
  std::size_t device_bytes = 0;
  std::size_t budget_bytes = 0;  // 0: budget_percent of the device's memory, found at first use
  double budget_percent = 0;     // 0: what is free then, less a headroom
  std::size_t host_budget_bytes = 0;  // 0: unbounded
  std::size_t min_swap_bytes = 0;
  std::size_t floor_bytes = 0;            // the minimum budget
  std::size_t piece_bytes = kPieceBytes;  // larger blocks are moved in pieces, each on its own
  std::string policy = "lru";
  std::string backing = "managed";  // "managed" | "mapped": how a GPU's memory can leave it
  bool guard = false;
  double watchdog_s = 0;  // how long a driver call may move memory before it is named; 0: never
  bool backed = true;     // false: a software device of addresses and virtual time, without memory
  // A folder for the evicted pages of the software device, in a file of at most so many bytes (0:
  // no limit); the frames of pages under way are in addition to the budget.
  std::string disk;
  std::size_t disk_bytes = 0, staging_bytes = 0;
  std::size_t disk_bytes_a_day = 0;  // that plans are to write; 0: as many as they like
  bool timed = false;  // the software device's time passes with the ops, as in a replay
  // The software device's link rates and the cost of a fault group; 0: the profile's.
  double link_in_bytes_per_us = 0, link_out_bytes_per_us = 0, fault_us = 0;

  bool operator==(const Options&) const = default;
};

// Bytes that a budget which follows the free memory leaves free, of so many: for contexts, kernels
// and other libraries.
constexpr std::size_t headroom_bytes(std::size_t bytes) {
  return std::min(512 * MiB, bytes / 8);
}

}  // namespace umem
