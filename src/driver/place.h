// The place of driver calls: device, context, and whether graphs are captured.
#pragma once
#include <atomic>

#include "driver/table.h"

namespace umem::driver {

struct Place {
  int device = 0;
  CUcontext context = nullptr;                 // null on the software device, which needs none
  const std::atomic<int>* captures = nullptr;  // how many graph captures may be under way
  bool timed = true;        // work in flight ends with time: false if no time passes
  bool integrated = false;  // the device's memory is the host's
};

// For the duration of some driver calls: makes the place's context the calling thread's, and allows
// this thread the calls that a capture forbids to all (they touch no captured stream): another
// thread may begin to capture a graph at any time.
class CallScope {
 public:
  CallScope(const Table& table, const Place& place) : table_(table) {
    if (place.context == nullptr) return;
    if (table.cuCtxGetCurrent(&previous_) == CUDA_SUCCESS && previous_ != place.context)
      changed_ = table.cuCtxSetCurrent(place.context) == CUDA_SUCCESS;
    relaxed_ = table.cuThreadExchangeStreamCaptureMode(&mode_) == CUDA_SUCCESS;
  }
  ~CallScope() {
    if (relaxed_) table_.cuThreadExchangeStreamCaptureMode(&mode_);
    if (changed_) table_.cuCtxSetCurrent(previous_);
  }
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

 private:
  const Table& table_;
  CUcontext previous_ = nullptr;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool changed_ = false, relaxed_ = false;
};

// True if work put on `stream` now would become part of a graph, or would break one.
inline bool capturing(const Table& table, const Place& place, CUstream stream) {
  if (place.context == nullptr) return false;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = table.cuStreamIsCapturing(stream, &status);
  return result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
         (result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE);
}

}  // namespace umem::driver
