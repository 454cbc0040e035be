// The functions of NVIDIA's management library with which torch counts devices. A process that has
// counted with them has not started CUDA, so its children can.
#include <cstdlib>
#include <cstring>

#define NVML_API extern "C" __attribute__((visibility("default")))

namespace {
constexpr int kSuccess = 0, kDriverNotLoaded = 9;
}  // namespace

// A machine without a driver has a cuInit that fails.
NVML_API int nvmlInit() {
  const char* failing = std::getenv("SOFTCUDA_FAIL");
  return failing && std::strstr(failing, "cuInit:") ? kDriverNotLoaded : kSuccess;
}

NVML_API int nvmlDeviceGetCount_v2(unsigned* count) {
  const char* devices = std::getenv("SOFTCUDA_DEVICES");
  *count = devices && *devices ? static_cast<unsigned>(std::atoi(devices)) : 1;
  return kSuccess;
}
