// The rate of a lane's transfers, from driver events around some of them: one at a time, so that a
// lane needs two events and a transfer few calls.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "driver/place.h"
#include "driver/table.h"

namespace umem::engine {

class LaneMeter {
 public:
  // The last transfers that were timed, together. Older ones count half as much.
  struct Timed {
    std::uint64_t bytes = 0, us = 0;
  };

  LaneMeter(const driver::Table& table, driver::Place place) : table_(table), place_(place) {}

  Timed timed() const { return {bytes_, ns_ / 1000}; }
  Status close();

  // The driver calls of a transfer, from construction to destruction, by one thread at a time.
  class Transfer {
   public:
    // It is not timed if it is small, if the one before is under way, or on the software device.
    Transfer(LaneMeter& meter, std::size_t bytes, cu::CUstream stream);
    ~Transfer();
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;

   private:
    LaneMeter& meter_;
    const std::size_t bytes_;
    cu::CUstream stream_;
    bool begun_ = false;
  };

 private:
  bool begin(cu::CUstream stream);
  void collect();

  const driver::Table& table_;
  const driver::Place place_;
  cu::CUevent begin_ = nullptr, end_ = nullptr;
  std::size_t under_way_ = 0;  // bytes between the events; 0: none
  std::atomic<std::uint64_t> bytes_{0}, ns_{0};
};

}  // namespace umem::engine
