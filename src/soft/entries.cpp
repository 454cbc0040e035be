// Device, context, stream and event entry points of the software device.
#include "soft/entries.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "soft/memory_entries.h"
#include "soft/state.h"

namespace umem::soft {
namespace {

using namespace umem::cu;  // NOLINT: the driver's own vocabulary

constexpr int kVersion = 13000;
int g_context_tag;  // its address is the primary context's handle

CUcontext primary_context() {
  return reinterpret_cast<CUcontext>(&g_context_tag);
}

template <class Body>
CUresult with_device(Body body) {
  DeviceLock lock;
  return g_device ? body(*g_device) : CUDA_ERROR_NOT_INITIALIZED;
}
template <class Body>
CUresult with_stream(CUstream stream, Body body) {
  return with_device(
      [&](Device& d) { return d.clock.known(stream) ? body(d) : CUDA_ERROR_INVALID_HANDLE; });
}
CUresult handle(bool found) {
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult init(unsigned flags) {
  return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult driver_version(int* version) {
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  *version = kVersion;
  return CUDA_SUCCESS;
}

CUresult error_name(CUresult error, const char** name) {
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  const char* found = driver::error_name(error);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  *name = found;
  return CUDA_SUCCESS;
}

CUresult device_count(int* count) {
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  return with_device([&](Device&) {
    *count = 1;
    return CUDA_SUCCESS;
  });
}

CUresult device_get(CUdevice* out, int ordinal) {
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  return with_device([&](Device&) {
    if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
    *out = 0;
    return CUDA_SUCCESS;
  });
}

CUresult device_name(char* name, int length, CUdevice ordinal) {
  return with_device([&](Device& d) {
    if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
    if (!name || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    std::snprintf(name, static_cast<std::size_t>(length), "umem software device (%s)",
                  d.profile.name);
    return CUDA_SUCCESS;
  });
}

CUresult device_total_mem(std::size_t* bytes, CUdevice ordinal) {
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  return with_device([&](Device& d) {
    if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = d.pager.frames() << kPageShift;
    return CUDA_SUCCESS;
  });
}

CUresult device_attribute(int* value, CUdevice_attribute attribute, CUdevice ordinal) {
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  return with_device([&](Device&) {
    if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
      case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
      case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
      case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
      case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
      case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = 1;
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_INTEGRATED:
      case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS:
      case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES:
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = 0;
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
        *value = -1;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult retain_context(CUcontext* context, CUdevice ordinal) {
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  return with_device([&](Device&) {
    if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
    *context = primary_context();
    return CUDA_SUCCESS;
  });
}
CUresult release_context(CUdevice ordinal) {
  return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult get_context(CUcontext* context) {
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  *context = primary_context();
  return CUDA_SUCCESS;
}
CUresult set_context(CUcontext context) {
  return !context || context == primary_context() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult synchronize_context() {
  return with_device([](Device& d) {
    d.clock.synchronize_all();
    return CUDA_SUCCESS;
  });
}

CUresult create_stream(CUstream* stream, unsigned flags) {
  if (!stream || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  return with_device([&](Device& d) {
    *stream = d.clock.create_stream();
    return CUDA_SUCCESS;
  });
}
CUresult destroy_stream(CUstream stream) {
  return with_device([&](Device& d) { return handle(d.clock.destroy_stream(stream)); });
}
CUresult synchronize_stream(CUstream stream) {
  return with_stream(stream, [&](Device& d) {
    d.clock.synchronize(stream);
    return CUDA_SUCCESS;
  });
}
CUresult query_stream(CUstream stream) {
  return with_stream(stream, [&](Device& d) {
    return d.clock.done(stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}
CUresult wait_event(CUstream stream, CUevent event, unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_stream(stream, [&](Device& d) {
    d.pager.arrive(d.clock.ticket_for(stream, event));
    return handle(d.clock.wait(stream, event));
  });
}
CUresult is_capturing(CUstream stream, CUstreamCaptureStatus* status) {
  if (!status) return CUDA_ERROR_INVALID_VALUE;
  return with_stream(stream, [&](Device&) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;  // there is no capture here
    return CUDA_SUCCESS;
  });
}

CUresult create_event(CUevent* event, unsigned flags) {
  if (!event || (flags & ~unsigned{CU_EVENT_DISABLE_TIMING}) != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_device([&](Device& d) {
    *event = d.clock.create_event(flags != CU_EVENT_DISABLE_TIMING);
    return CUDA_SUCCESS;
  });
}
CUresult destroy_event(CUevent event) {
  return with_device([&](Device& d) { return handle(d.clock.destroy_event(event)); });
}
CUresult record_event(CUevent event, CUstream stream) {
  return with_stream(stream, [&](Device& d) {
    return handle(d.clock.record(event, stream, d.pager.last_ticket()));
  });
}
CUresult query_event(CUevent event) {
  return with_device([&](Device& d) {
    switch (d.clock.query(event)) {
      case Clock::EventState::kDone:
        return CUDA_SUCCESS;
      case Clock::EventState::kPending:
        return CUDA_ERROR_NOT_READY;
      case Clock::EventState::kUnknown:
        break;
    }
    return CUDA_ERROR_INVALID_HANDLE;
  });
}
CUresult synchronize_event(CUevent event) {
  return with_device([&](Device& d) { return handle(d.clock.synchronize(event)); });
}
CUresult elapsed_time(float* milliseconds, CUevent start, CUevent end) {
  if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
  return with_device([&](Device& d) {
    switch (d.clock.elapsed(start, end, *milliseconds)) {
      case Clock::Elapsed::kOk:
        return CUDA_SUCCESS;
      case Clock::Elapsed::kPending:
        return CUDA_ERROR_NOT_READY;
      case Clock::Elapsed::kUnknown:
      case Clock::Elapsed::kNotTimed:
        break;
    }
    return CUDA_ERROR_INVALID_HANDLE;
  });
}

}  // namespace

void fill_entries(driver::Table& table) {
  table.cuInit = init;
  table.cuDriverGetVersion = driver_version;
  table.cuGetErrorName = error_name;
  table.cuDeviceGetCount = device_count;
  table.cuDeviceGet = device_get;
  table.cuDeviceGetName = device_name;
  table.cuDeviceTotalMem = device_total_mem;
  table.cuDeviceGetAttribute = device_attribute;
  table.cuDevicePrimaryCtxRetain = retain_context;
  table.cuDevicePrimaryCtxRelease = release_context;
  table.cuCtxGetCurrent = get_context;
  table.cuCtxSetCurrent = set_context;
  table.cuCtxSynchronize = synchronize_context;
  table.cuStreamCreate = create_stream;
  table.cuStreamDestroy = destroy_stream;
  table.cuStreamSynchronize = synchronize_stream;
  table.cuStreamQuery = query_stream;
  table.cuStreamWaitEvent = wait_event;
  table.cuStreamIsCapturing = is_capturing;
  table.cuEventCreate = create_event;
  table.cuEventDestroy = destroy_event;
  table.cuEventRecord = record_event;
  table.cuEventQuery = query_event;
  table.cuEventSynchronize = synchronize_event;
  table.cuEventElapsedTime = elapsed_time;
  fill_memory_entries(table);
}

}  // namespace umem::soft
