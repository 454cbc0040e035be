// The rate of a lane's transfers, from driver events around some of them: one at a time, so that a
// lane needs two events and a transfer few calls.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "base/status.h"
#include "driver/place.h"
#include "driver/table.h"

namespace umem::engine {

class LaneMeter {
 public:
  // The last transfers that were timed, together: 64 MiB and more, or none.
  struct Timed {
    std::uint64_t bytes = 0, us = 0;
  };

  LaneMeter(const driver::Table& table, driver::Place place) : table_(table), place_(place) {}

  Timed timed() const {
    const std::lock_guard guard(mutex_);
    return last_;
  }
  Status close();

  // Around the driver calls of a transfer of so many bytes, by one thread at a time. False: it is
  // not timed, because it is small, another one was timed lately or is under way, or on the
  // software device. Otherwise call `end` if the calls succeeded.
  bool begin(std::size_t bytes, cu::CUstream stream);
  void end(cu::CUstream stream);

 private:
  void collect();

  const driver::Table& table_;
  const driver::Place place_;
  cu::CUevent begin_ = nullptr, end_ = nullptr;
  std::size_t bytes_ = 0;      // between the events
  bool under_way_ = false;     // both are recorded
  std::size_t transfers_ = 0;  // of 2 MiB and more
  // The transfers that will be the last ones.
  std::size_t count_ = 0, windows_ = 0;
  std::uint64_t sum_bytes_ = 0;
  double sum_us_ = 0;
  mutable std::mutex mutex_;  // guards `last_`
  Timed last_;
};

}  // namespace umem::engine
