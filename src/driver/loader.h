// The real driver: libcuda.so.1, found at run time only, so that umem installs and imports without
// it.
#pragma once
#include "base/status.h"
#include "driver/table.h"

namespace umem::driver {

// Fills `driver` from libcuda.so.1 with the forms that symbols.def names; entry points that this
// driver lacks return CUDA_ERROR_NOT_FOUND. kNotSupported, with the reason, when there is no
// driver.
UMEM_API Status open_cuda(Driver& driver);

// True if libcuda.so.1 has the form of an entry point from this CUDA version.
bool libcuda_exports(const char* name, int version);

}  // namespace umem::driver
