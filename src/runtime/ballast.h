// A smaller device in place of the one there is: the rest of its memory is held, as plain device
// memory, so that umem, the driver and every other user of the device have no more than that.
#pragma once
#include <cstddef>
#include <vector>

#include "base/status.h"
#include "driver/place.h"
#include "driver/table.h"

namespace umem::runtime {

class Ballast {
 public:
  explicit Ballast(const driver::Table& table, const driver::Place& place)
      : table_(table), place_(place) {}
  // Gives the memory back.
  ~Ballast();
  Ballast(const Ballast&) = delete;
  Ballast& operator=(const Ballast&) = delete;

  // Leaves `bytes` of the device. kInvalidArgument: it has not that many; kOutOfDeviceMemory:
  // others hold what is to be held.
  Status leave(std::size_t bytes);

 private:
  const driver::Table& table_;
  driver::Place place_;
  std::vector<cu::CUdeviceptr> pieces_;
};

}  // namespace umem::runtime
