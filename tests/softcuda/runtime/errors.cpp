// Names and texts of errors, in the runtime's words: torch prints both and searches for some.
#include <array>

#include "common.h"

namespace {

struct ErrorText {
  cudaError_t error;
  const char* name;
  const char* text;
};

#define ERROR(name, text) {name, #name, text}
constexpr std::array kErrors{
    ErrorText ERROR(cudaSuccess, "no error"),
    ErrorText ERROR(cudaErrorInvalidValue, "invalid argument"),
    ErrorText ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ErrorText ERROR(cudaErrorInitializationError, "initialization error"),
    ErrorText ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    ErrorText ERROR(cudaErrorInvalidSymbol, "invalid device symbol"),
    ErrorText ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    ErrorText ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    ErrorText ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ErrorText ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    ErrorText ERROR(cudaErrorDeviceUninitialized, "invalid device context"),
    ErrorText ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ErrorText ERROR(cudaErrorSymbolNotFound, "named symbol not found"),
    ErrorText ERROR(cudaErrorNotReady, "device not ready"),
    ErrorText ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ErrorText ERROR(cudaErrorHostMemoryAlreadyRegistered,
                    "part or all of the requested memory range is already mapped"),
    ErrorText ERROR(cudaErrorHostMemoryNotRegistered,
                    "pointer does not correspond to a registered memory region"),
    ErrorText ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    ErrorText ERROR(cudaErrorNotPermitted, "operation not permitted"),
    ErrorText ERROR(cudaErrorNotSupported, "operation not supported"),
    ErrorText ERROR(cudaErrorStreamCaptureUnsupported,
                    "operation not permitted when stream is capturing"),
    ErrorText ERROR(cudaErrorStreamCaptureInvalidated,
                    "operation failed due to a previous error during capture"),
    ErrorText ERROR(cudaErrorStreamCaptureUnmatched,
                    "capture was not ended in the same stream as it began"),
    ErrorText ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    ErrorText ERROR(cudaErrorStreamCaptureIsolation,
                    "dependency created on uncaptured work in another stream"),
    ErrorText ERROR(cudaErrorStreamCaptureImplicit,
                    "operation would make the legacy stream depend on a capturing blocking stream"),
    ErrorText ERROR(cudaErrorCapturedEvent,
                    "operation not permitted on an event last recorded in a capturing stream"),
    ErrorText ERROR(cudaErrorStreamCaptureWrongThread,
                    "attempt to terminate a thread-local capture sequence from another thread"),
    ErrorText ERROR(cudaErrorUnknown, "unknown error"),
};
#undef ERROR

const ErrorText* find(cudaError_t error) {
  for (const ErrorText& entry : kErrors)
    if (entry.error == error) return &entry;
  return nullptr;
}

}  // namespace

extern "C" {
__attribute__((visibility("default"))) const char* cudaGetErrorName(cudaError_t error) {
  const ErrorText* found = find(error);
  return found ? found->name : "unrecognized error code";
}
__attribute__((visibility("default"))) const char* cudaGetErrorString(cudaError_t error) {
  const ErrorText* found = find(error);
  return found ? found->text : "unrecognized error code";
}
}
