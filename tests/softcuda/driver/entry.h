// How an entry point is defined: exported under its name and listed for cuGetProcAddress.
#pragma once
#include <string>

#include "devices.h"
#include "probes.h"

namespace softcuda {

struct Entry {
  Entry(const char* exported, int since, void* function);
};

// Initialised, and the calling thread has a context.
CUresult check_context();
// The error of a lost device.
CUresult device_state();

}  // namespace softcuda

// ENTRY(exported name, CUDA version of this form, parameters) { body }
#define ENTRY(name, since, params)                                                           \
  extern "C" __attribute__((visibility("default"))) CUresult name params;                    \
  static const ::softcuda::Entry entry_##name(#name, since, reinterpret_cast<void*>(&name)); \
  extern "C" CUresult name params

#define RETURN_IF_FAILED(expression)                                                 \
  do {                                                                               \
    if (const CUresult failed = (expression); failed != CUDA_SUCCESS) return failed; \
  } while (false)
