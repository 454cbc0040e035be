// Devices, the last error, versions.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "common.h"

using softcudart::finish;

namespace {

thread_local cudaError_t t_last_error = cudaSuccess;

int enter_device(int device) {
  void* context = nullptr;
  static std::vector<void*> contexts(8, nullptr);  // retained once a device, as the runtime does
  if (device < 0 || device >= softcuda_device_count()) return cudaErrorInvalidDevice;
  void*& slot = contexts[static_cast<std::size_t>(device)];
  if (!slot) {
    if (const int error = cuDevicePrimaryCtxRetain(&context, device)) return error;
    slot = context;
  }
  return cuCtxSetCurrent(slot);
}

int attribute(int which, int device) {
  int value = 0;
  cuDeviceGetAttribute(&value, which, device);
  return value;
}

void describe(cudaDeviceProp& p, int device) {
  p = {};
  std::snprintf(p.name, sizeof p.name, "umem softcuda %d", device);
  p.uuid.bytes[0] = 0x5c;
  p.uuid.bytes[15] = static_cast<char>(device + 1);
  p.totalGlobalMem = softcuda_device_bytes();
  p.sharedMemPerBlock =
      static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlock, device));
  p.sharedMemPerBlockOptin =
      static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  p.sharedMemPerMultiprocessor = p.sharedMemPerBlockOptin;
  p.regsPerBlock = p.regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerBlock, device);
  p.warpSize = attribute(cudaDevAttrWarpSize, device);
  p.maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock, device);
  p.maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor, device);
  p.maxBlocksPerMultiProcessor = 32;
  const int block[] = {1024, 1024, 64}, grid[] = {2147483647, 65535, 65535};
  std::copy_n(block, 3, p.maxThreadsDim);
  std::copy_n(grid, 3, p.maxGridSize);
  p.totalConstMem = 65536;
  p.major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  p.minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  p.multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount, device);
  p.textureAlignment = 512;
  p.l2CacheSize = 4 << 20;
  p.memoryBusWidth = 4096;
  p.canMapHostMemory = p.unifiedAddressing = p.managedMemory = p.concurrentManagedAccess = 1;
  p.concurrentKernels = p.asyncEngineCount = p.streamPrioritiesSupported = 1;
  p.hostRegisterSupported = p.memoryPoolsSupported = 1;
  p.pciBusID = device + 1;
}

}  // namespace

cudaError_t softcudart::finish(int result) {
  const auto error = static_cast<cudaError_t>(result);
  if (error != cudaSuccess && error != cudaErrorNotReady) t_last_error = error;
  return error;
}

int softcudart::ensure_context() {
  if (const int error = cuInit(0)) return error;
  int device = 0;
  return cuCtxGetDevice(&device) == cudaSuccess ? 0 : enter_device(0);
}

RUNTIME_API cudaGetDeviceCount(int* count) {
  RUNTIME_COUNT();
  if (!count) return finish(cudaErrorInvalidValue);
  if (const int error = cuInit(0)) return finish(error);
  *count = softcuda_device_count();
  return finish(0);
}
RUNTIME_API cudaGetDevice(int* device) {
  RUNTIME_ENTER();
  return finish(cuCtxGetDevice(device));
}
RUNTIME_API cudaSetDevice(int device) {
  RUNTIME_ENTER();
  return finish(enter_device(device));
}
RUNTIME_API cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  RUNTIME_ENTER();
  if (!properties) return finish(cudaErrorInvalidValue);
  if (device < 0 || device >= softcuda_device_count()) return finish(cudaErrorInvalidDevice);
  describe(*properties, device);
  return finish(0);
}
RUNTIME_API cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  RUNTIME_ENTER();
  return finish(cuDeviceGetAttribute(value, which, device));
}
RUNTIME_API cudaDeviceGetPCIBusId(char* id, int length, int device) {
  RUNTIME_ENTER();
  return finish(cuDeviceGetPCIBusId(id, length, device));
}
RUNTIME_API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  RUNTIME_ENTER();
  return finish(cuCtxGetStreamPriorityRange(least, greatest));
}
RUNTIME_API cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  RUNTIME_ENTER();
  return finish(cuDeviceCanAccessPeer(can, device, peer));
}
RUNTIME_API cudaDeviceEnablePeerAccess(int peer, unsigned) {
  RUNTIME_ENTER();
  int device = 0, can = 0;
  cuCtxGetDevice(&device);
  const int error = cuDeviceCanAccessPeer(&can, device, peer);
  return finish(error ? error : can ? 0 : cudaErrorInvalidDevice);
}
RUNTIME_API cudaDeviceSynchronize() {
  RUNTIME_ENTER();
  return finish(cuCtxSynchronize());
}
RUNTIME_API cudaDriverGetVersion(int* version) {
  return finish(cuDriverGetVersion(version));
}
RUNTIME_API cudaRuntimeGetVersion(int* version) {
  if (!version) return finish(cudaErrorInvalidValue);
  *version = CUDART_VERSION;
  return finish(0);
}
RUNTIME_API cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* status) {
  RUNTIME_ENTER();
  int result = 0;
  cuGetProcAddress_v2(symbol, function, static_cast<int>(version), flags, &result);
  if (status) *status = static_cast<cudaDriverEntryPointQueryResult>(result);
  return finish(0);  // `status` reports missing ones
}
RUNTIME_API cudaGetLastError() {
  const cudaError_t error = t_last_error;
  t_last_error = cudaSuccess;
  return error;
}
RUNTIME_API cudaPeekAtLastError() {
  return t_last_error;
}
RUNTIME_API cudaProfilerStart() {
  return finish(0);
}
RUNTIME_API cudaProfilerStop() {
  return finish(0);
}
