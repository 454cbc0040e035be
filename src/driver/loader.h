// The real driver: libcuda.so.1, found at run time only, so that umem installs and imports where
// there is none.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "base/export.h"
#include "base/status.h"
#include "driver/table.h"

namespace umem::driver {

// Fills `driver` from libcuda.so.1 with the forms that symbols.def names; entry points that this
// driver lacks return CUDA_ERROR_NOT_FOUND. kNotSupported, with the reason, when there is no
// driver.
Status open_cuda(Driver& driver);

struct CudaDevice {
  std::string name;
  std::size_t total_bytes = 0;
  int major = 0, minor = 0;  // compute capability
  bool managed_memory = false;
  bool concurrent_managed_access = false;
  bool pageable_memory_access = false;
};
struct CudaProbe {
  bool available = false;  // umem can use at least one device
  std::string reason;      // why not
  int driver_version = 0;  // 13000 is CUDA 13.0
  std::vector<CudaDevice> devices;
};
// Looks at the driver without creating a context.
UMEM_API CudaProbe probe_cuda();

}  // namespace umem::driver
