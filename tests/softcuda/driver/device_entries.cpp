// Device and context entry points.
#include <cstdio>
#include <cstring>

#include "capture.h"
#include "config.h"
#include "entry.h"
#include "work.h"

using namespace softcuda;  // NOLINT

CUresult softcuda::device_state() {
  return static_cast<CUresult>(lost());
}

CUresult softcuda::check_context() {
  RETURN_IF_FAILED(check_initialized());
  return current_device() < 0 ? kInvalidContext : CUDA_SUCCESS;
}

namespace {

CUresult check_device(CUdevice device) {
  RETURN_IF_FAILED(check_initialized());
  return valid_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

// The attributes by which a program may size its work: an A100's, as torch has kernels for it.
int attribute_value(int attribute) {
  switch (attribute) {
    case 1:  // MAX_THREADS_PER_BLOCK
    case 2:  // MAX_BLOCK_DIM_X
    case 3:  // MAX_BLOCK_DIM_Y
      return 1024;
    case 4:  // MAX_BLOCK_DIM_Z
      return 64;
    case 5:  // MAX_GRID_DIM_X
      return 2147483647;
    case 6:  // MAX_GRID_DIM_Y
    case 7:  // MAX_GRID_DIM_Z
      return 65535;
    case 8:  // MAX_SHARED_MEMORY_PER_BLOCK
      return 49152;
    case 9:  // TOTAL_CONSTANT_MEMORY
      return 65536;
    case 10:  // WARP_SIZE
      return 32;
    case 12:  // MAX_REGISTERS_PER_BLOCK
      return 65536;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return 108;
    case 39:  // MAX_THREADS_PER_MULTIPROCESSOR
      return 2048;
    case 97:  // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
      return 166912;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return 8;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case 31:   // CONCURRENT_KERNELS
    case 40:   // ASYNC_ENGINE_COUNT
    case 78:   // STREAM_PRIORITIES_SUPPORTED
    case 92:   // CAN_USE_STREAM_MEM_OPS_V1
    case 99:   // HOST_REGISTER_SUPPORTED
    case 102:  // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    case 141:  // HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
      return 1;
    default:
      return 0;
  }
}

const char* error_name(CUresult error) {
  switch (static_cast<int>(error)) {
#define NAME(code, name) \
  case code:             \
    return "CUDA_" name
    NAME(0, "SUCCESS");
    NAME(1, "ERROR_INVALID_VALUE");
    NAME(2, "ERROR_OUT_OF_MEMORY");
    NAME(3, "ERROR_NOT_INITIALIZED");
    NAME(4, "ERROR_DEINITIALIZED");
    NAME(46, "ERROR_DEVICE_UNAVAILABLE");
    NAME(100, "ERROR_NO_DEVICE");
    NAME(101, "ERROR_INVALID_DEVICE");
    NAME(201, "ERROR_INVALID_CONTEXT");
    NAME(217, "ERROR_PEER_ACCESS_UNSUPPORTED");
    NAME(400, "ERROR_INVALID_HANDLE");
    NAME(500, "ERROR_NOT_FOUND");
    NAME(600, "ERROR_NOT_READY");
    NAME(700, "ERROR_ILLEGAL_ADDRESS");
    NAME(712, "ERROR_HOST_MEMORY_ALREADY_REGISTERED");
    NAME(713, "ERROR_HOST_MEMORY_NOT_REGISTERED");
    NAME(719, "ERROR_LAUNCH_FAILED");
    NAME(800, "ERROR_NOT_PERMITTED");
    NAME(801, "ERROR_NOT_SUPPORTED");
    NAME(900, "ERROR_STREAM_CAPTURE_UNSUPPORTED");
    NAME(901, "ERROR_STREAM_CAPTURE_INVALIDATED");
    NAME(903, "ERROR_STREAM_CAPTURE_UNMATCHED");
    NAME(904, "ERROR_STREAM_CAPTURE_UNJOINED");
    NAME(905, "ERROR_STREAM_CAPTURE_ISOLATION");
    NAME(906, "ERROR_STREAM_CAPTURE_IMPLICIT");
    NAME(907, "ERROR_CAPTURED_EVENT");
    NAME(908, "ERROR_STREAM_CAPTURE_WRONG_THREAD");
    NAME(999, "ERROR_UNKNOWN");
#undef NAME
    default:
      return nullptr;
  }
}

}  // namespace

ENTRY(cuInit, 2000, (unsigned flags)) {
  SOFTCUDA_ENTER();
  return flags == 0 ? initialize() : CUDA_ERROR_INVALID_VALUE;
}
ENTRY(cuDriverGetVersion, 2020, (int* version)) {
  SOFTCUDA_ENTER();
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  *version = config().version;
  return CUDA_SUCCESS;
}
ENTRY(cuGetErrorName, 6000, (CUresult error, const char** name)) {
  SOFTCUDA_ENTER();
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  *name = error_name(error);
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
ENTRY(cuGetErrorString, 6000, (CUresult error, const char** text)) {
  SOFTCUDA_ENTER();
  return cuGetErrorName(error, text);
}
ENTRY(cuDeviceGetCount, 2000, (int* count)) {
  SOFTCUDA_ENTER();
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_initialized());
  *count = device_count();
  return CUDA_SUCCESS;
}
ENTRY(cuDeviceGet, 2000, (CUdevice * device, int ordinal)) {
  SOFTCUDA_ENTER();
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_device(ordinal));
  *device = ordinal;
  return CUDA_SUCCESS;
}
ENTRY(cuDeviceGetName, 2000, (char* name, int length, CUdevice device)) {
  SOFTCUDA_ENTER();
  if (!name || length <= 0) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_device(device));
  std::snprintf(name, static_cast<std::size_t>(length), "umem softcuda %d", device);
  return CUDA_SUCCESS;
}
ENTRY(cuDeviceGetPCIBusId, 4010, (char* id, int length, CUdevice device)) {
  SOFTCUDA_ENTER();
  if (!id || length < 13) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_device(device));
  std::snprintf(id, static_cast<std::size_t>(length), "0000:%02x:00.0", device + 1);
  return CUDA_SUCCESS;
}
ENTRY(cuDeviceGetUuid_v2, 11040, (unsigned char* uuid, CUdevice device)) {
  SOFTCUDA_ENTER();
  if (!uuid) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_device(device));
  std::memset(uuid, 0, 16);
  uuid[0] = 0x5c;
  uuid[15] = static_cast<unsigned char>(device + 1);
  return CUDA_SUCCESS;
}
ENTRY(cuDeviceTotalMem_v2, 3020, (std::size_t* bytes, CUdevice device)) {
  SOFTCUDA_ENTER();
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_device(device));
  *bytes = config().bytes;
  return CUDA_SUCCESS;
}
ENTRY(cuDeviceGetAttribute, 2000, (int* value, CUdevice_attribute attribute, CUdevice device)) {
  SOFTCUDA_ENTER();
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_device(device));
  *value = attribute_value(attribute);
  if (attribute == CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS &&
      config().no_cma.count(std::to_string(device)))
    *value = 0;
  if (attribute == CU_DEVICE_ATTRIBUTE_INTEGRATED) *value = config().integrated;
  return CUDA_SUCCESS;
}
ENTRY(cuDeviceCanAccessPeer, 4000, (int* can, CUdevice device, CUdevice peer)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_device(device));
  RETURN_IF_FAILED(check_device(peer));
  *can = device != peer;
  return CUDA_SUCCESS;
}
ENTRY(cuDevicePrimaryCtxRetain, 7000, (CUcontext * context, CUdevice device)) {
  SOFTCUDA_ENTER();
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_device(device));
  retain(device, 1);
  *context = context_of(device);
  return CUDA_SUCCESS;
}
ENTRY(cuDevicePrimaryCtxRelease_v2, 11000, (CUdevice device)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_device(device));
  retain(device, -1);
  return CUDA_SUCCESS;
}
ENTRY(cuDevicePrimaryCtxGetState, 7000, (CUdevice device, unsigned* flags, int* active)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_device(device));
  if (flags) *flags = 0;
  if (active) *active = retain(device, 0) > 0;
  return CUDA_SUCCESS;
}
ENTRY(cuCtxGetCurrent, 4000, (CUcontext * context)) {
  SOFTCUDA_ENTER();
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_initialized());
  *context = context_of(current_device());
  return CUDA_SUCCESS;
}
ENTRY(cuCtxSetCurrent, 4000, (CUcontext context)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_initialized());
  const int device = device_of(context);
  if (context && device < 0) return kInvalidContext;
  set_current_device(device);
  return CUDA_SUCCESS;
}
namespace {
thread_local std::vector<int> t_context_stack;
}
ENTRY(cuCtxPushCurrent_v2, 4000, (CUcontext context)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_initialized());
  const int device = device_of(context);
  if (device < 0) return kInvalidContext;
  t_context_stack.push_back(current_device());
  set_current_device(device);
  return CUDA_SUCCESS;
}
ENTRY(cuCtxPopCurrent_v2, 4000, (CUcontext * context)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_context());
  if (t_context_stack.empty()) return kInvalidContext;
  if (context) *context = context_of(current_device());
  set_current_device(t_context_stack.back());
  t_context_stack.pop_back();
  return CUDA_SUCCESS;
}
ENTRY(cuCtxGetDevice, 2000, (CUdevice * device)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_context());
  *device = current_device();
  return CUDA_SUCCESS;
}
ENTRY(cuCtxSynchronize, 2000, ()) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_context());
  auto lock = lock_work();
  RETURN_IF_FAILED(check_unsafe());
  RETURN_IF_FAILED(check_no_capture(current_device()));
  wait_device(lock, current_device());
  return device_state();
}
ENTRY(cuCtxGetStreamPriorityRange, 5050, (int* least, int* greatest)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_context());
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}
