// Makes the device smaller: the ballast holds the rest of its memory as plain device memory, so
// that umem, the driver and all other users of the device have no more than was asked for.
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

  // Leaves `bytes` of the device. kInvalidArgument: the device is smaller; kOutOfDeviceMemory:
  // other programs hold memory that the ballast needs.
  Status leave(std::size_t bytes);

 private:
  const driver::Table& table_;
  driver::Place place_;
  std::vector<cu::CUdeviceptr> pieces_;
};

}  // namespace umem::runtime
