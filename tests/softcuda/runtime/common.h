// The software libcudart speaks to the software libcuda by these declarations, in plain types: the
// runtime's own headers and umem's declarations of the driver cannot be included together.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "softcuda.h"

#pragma GCC visibility push(default)
extern "C" {
struct SoftLocation {
  int type, id;
};
int cuInit(unsigned);
int cuDriverGetVersion(int*);
int cuGetProcAddress_v2(const char*, void**, int, std::uint64_t, int*);
int cuDeviceGetAttribute(int*, int, int);
int cuDeviceGetPCIBusId(char*, int, int);
int cuDevicePrimaryCtxRetain(void**, int);
int cuCtxGetDevice(int*);
int cuCtxSetCurrent(void*);
int cuCtxSynchronize();
int cuCtxGetStreamPriorityRange(int*, int*);
int cuDeviceCanAccessPeer(int*, int, int);
int cuMemGetInfo_v2(std::size_t*, std::size_t*);
int cuMemAlloc_v2(std::uint64_t*, std::size_t);
int cuMemAllocManaged(std::uint64_t*, std::size_t, unsigned);
int cuMemFree_v2(std::uint64_t);
int cuMemHostAlloc(void**, std::size_t, unsigned);
int cuMemFreeHost(void*);
int cuMemHostRegister_v2(void*, std::size_t, unsigned);
int cuMemHostUnregister(void*);
int cuMemcpyAsync(std::uint64_t, std::uint64_t, std::size_t, void*);
int cuMemcpy(std::uint64_t, std::uint64_t, std::size_t);
int cuMemsetD8Async(std::uint64_t, unsigned char, std::size_t, void*);
int cuPointerGetAttribute(void*, int, std::uint64_t);
int cuStreamCreateWithPriority(void**, unsigned, int);
int cuStreamDestroy_v2(void*);
int cuStreamGetPriority(void*, int*);
int cuStreamSynchronize(void*);
int cuStreamQuery(void*);
int cuStreamWaitEvent(void*, void*, unsigned);
int cuLaunchHostFunc(void*, void (*)(void*), void*);
int cuEventCreate(void**, unsigned);
int cuEventDestroy_v2(void*);
int cuEventRecord(void*, void*);
int cuEventQuery(void*);
int cuEventSynchronize(void*);
int cuEventElapsedTime_v2(float*, void*, void*);
int cuStreamBeginCapture_v2(void*, int);
int cuStreamBeginCaptureToGraph(void*, void*, const void*, const void*, std::size_t, int);
int cuStreamEndCapture(void*, void**);
int cuStreamIsCapturing(void*, int*);
int cuStreamGetCaptureInfo_v3(void*, int*, unsigned long long*, void**, const void**, const void**,
                              std::size_t*);
int cuStreamUpdateCaptureDependencies_v2(void*, const void*, const void*, std::size_t, unsigned);
int cuThreadExchangeStreamCaptureMode(int*);
int cuGraphCreate(void**, unsigned);
int cuGraphInstantiateWithFlags(void**, void*, std::uint64_t);
int cuGraphLaunch(void*, void*);
int cuGraphDestroy(void*);
int cuGraphExecDestroy(void*);
int cuGraphConditionalHandleCreate(unsigned long long*, void*, void*, unsigned, unsigned);
int cuGraphAddNode_v2(void**, void*, const void*, const void*, std::size_t, void*);
int cuUserObjectCreate(void**, void*, void (*)(void*), unsigned, unsigned);
int cuUserObjectRetain(void*, unsigned);
int cuUserObjectRelease(void*, unsigned);
int cuGraphRetainUserObject(void*, void*, unsigned, unsigned);
int cuGraphReleaseUserObject(void*, void*, unsigned);
}
#pragma GCC visibility pop

namespace softcudart {

// Makes a failure the thread's last error (cudaErrorNotReady is none) and returns it. Driver and
// runtime share their numbers.
cudaError_t finish(int result);
// Starts the driver and gives the thread a context: the runtime's rule for every call.
int ensure_context();

// A call in progress: its driver calls are not counted as the program's.
struct Call {
  const int planned;
  explicit Call(void* probe) : planned(softcuda_enter(probe)) {}
  ~Call() { softcuda_leave(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  int result() const { return planned > 0 ? planned : 0; }
};

// A handle that the driver writes.
template <class Handle>
void** out(Handle* handle) {
  return reinterpret_cast<void**>(handle);
}

inline std::uint64_t address(const void* ptr) {
  return reinterpret_cast<std::uint64_t>(ptr);
}

}  // namespace softcudart

#define RUNTIME_API extern "C" __attribute__((visibility("default"))) cudaError_t

// First statement of an entry point: counts it, fails as planned.
#define RUNTIME_COUNT()                                             \
  static void* const softcuda_own_probe = softcuda_probe(__func__); \
  const softcudart::Call softcuda_call(softcuda_own_probe);         \
  if (softcuda_call.planned) return softcudart::finish(softcuda_call.result())

// And makes the context.
#define RUNTIME_ENTER() \
  RUNTIME_COUNT();      \
  if (const int error = softcudart::ensure_context()) return softcudart::finish(error)
