// Stream, event and capture entry points.
#include <algorithm>

#include "capture.h"
#include "config.h"
#include "entry.h"
#include "softcuda.h"
#include "work.h"

using namespace softcuda;  // NOLINT

namespace {

// With the lock held and a stream that exists.
template <class Body>
CUresult with_stream(CUstream handle, Body body) {
  RETURN_IF_FAILED(check_context());
  auto lock = lock_work();
  const StreamRef stream = find_stream(handle);
  return stream ? body(lock, stream) : CUDA_ERROR_INVALID_HANDLE;
}
template <class Body>
CUresult with_event(CUevent handle, Body body) {
  RETURN_IF_FAILED(check_context());
  auto lock = lock_work();
  const std::shared_ptr<Event> event = find_event(handle);
  return event ? body(lock, *event) : CUDA_ERROR_INVALID_HANDLE;
}
CUresult known(bool found) {
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

}  // namespace

ENTRY(cuStreamCreateWithPriority, 5050, (CUstream * stream, unsigned flags, int priority)) {
  SOFTCUDA_ENTER();
  if (!stream || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_context());
  const auto lock = lock_work();
  *stream = add_stream(current_device(), flags, std::clamp(priority, -5, 0));
  return CUDA_SUCCESS;
}
ENTRY(cuStreamCreate, 2000, (CUstream * stream, unsigned flags)) {
  SOFTCUDA_ENTER();
  return cuStreamCreateWithPriority(stream, flags, 0);
}
ENTRY(cuStreamDestroy_v2, 4000, (CUstream stream)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_context());
  const auto lock = lock_work();
  return known(remove_stream(stream));
}
ENTRY(cuStreamGetPriority, 5050, (CUstream stream, int* priority)) {
  SOFTCUDA_ENTER();
  return with_stream(stream, [&](auto&, const StreamRef& s) {
    *priority = s->priority;
    return CUDA_SUCCESS;
  });
}
ENTRY(cuStreamGetFlags, 5050, (CUstream stream, unsigned* flags)) {
  SOFTCUDA_ENTER();
  return with_stream(stream, [&](auto&, const StreamRef& s) {
    *flags = s->flags;
    return CUDA_SUCCESS;
  });
}
ENTRY(cuStreamSynchronize, 2000, (CUstream stream)) {
  SOFTCUDA_ENTER();
  return with_stream(stream, [](auto& lock, const StreamRef& s) {
    RETURN_IF_FAILED(check_not_capturing(s));
    RETURN_IF_FAILED(check_unsafe());
    wait_stream(lock, s);
    return device_state();
  });
}
ENTRY(cuStreamGetCtx, 9020, (CUstream stream, CUcontext* context)) {
  SOFTCUDA_ENTER();
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  return with_stream(stream, [&](auto&, const StreamRef& s) {
    *context = context_of(s->device);
    return CUDA_SUCCESS;
  });
}
ENTRY(cuStreamQuery, 2000, (CUstream stream)) {
  SOFTCUDA_ENTER();
  return with_stream(stream, [](auto&, const StreamRef& s) {
    RETURN_IF_FAILED(check_not_capturing(s));
    RETURN_IF_FAILED(check_unsafe());
    poll();
    const bool waits =
        std::any_of(s->waits.begin(), s->waits.end(), [](const Moment& m) { return !m.reached(); });
    if (!now(s).reached() || waits) return CUDA_ERROR_NOT_READY;
    for (const KnownRef& known : all_known_after(s->strand)) races().host_knows(known->clock);
    return device_state();
  });
}
ENTRY(cuStreamWaitEvent, 3020, (CUstream stream, CUevent event, unsigned)) {
  SOFTCUDA_ENTER();
  return with_stream(stream, [&](auto&, const StreamRef& s) {
    const std::shared_ptr<Event> e = find_event(event);
    return e ? wait_event(s, *e) : CUDA_ERROR_INVALID_HANDLE;
  });
}
ENTRY(cuLaunchHostFunc, 10000, (CUstream stream, void (*function)(void*), void* data)) {
  SOFTCUDA_ENTER();
  if (!function) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_context());
  const Work work = [function, data] {
    run_host_function(function, data);
    return CUDA_SUCCESS;
  };
  return enqueue_host_function(stream, work);
}

ENTRY(cuEventCreate, 2000, (CUevent * event, unsigned flags)) {
  SOFTCUDA_ENTER();
  constexpr unsigned kInterprocess = 4;
  if (!event || flags > 7) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & kInterprocess) && !(flags & CU_EVENT_DISABLE_TIMING))
    return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_context());
  const auto lock = lock_work();
  *event = add_event(current_device(), flags);
  return CUDA_SUCCESS;
}
ENTRY(cuEventDestroy_v2, 4000, (CUevent event)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_context());
  const auto lock = lock_work();
  return known(remove_event(event));
}
ENTRY(cuEventRecord, 2000, (CUevent event, CUstream stream)) {
  SOFTCUDA_ENTER();
  return with_stream(stream, [&](auto&, const StreamRef& s) {
    const std::shared_ptr<Event> e = find_event(event);
    if (!e || e->device != s->device) return CUDA_ERROR_INVALID_HANDLE;
    return record(*e, s);
  });
}
ENTRY(cuEventQuery, 2000, (CUevent event)) {
  SOFTCUDA_ENTER();
  return with_event(event, [](auto&, const Event& e) {
    if (e.capture) return kCapturedEvent;
    RETURN_IF_FAILED(check_unsafe());
    poll();
    if (e.recorded && !e.at.reached()) return CUDA_ERROR_NOT_READY;
    if (e.known) races().host_knows(e.known->clock);
    return device_state();
  });
}
ENTRY(cuEventSynchronize, 2000, (CUevent event)) {
  SOFTCUDA_ENTER();
  return with_event(event, [](auto& lock, const Event& e) {
    if (e.capture) return kCapturedEvent;
    RETURN_IF_FAILED(check_unsafe());
    const Moment at = e.at;  // the present record, regardless of later ones
    const KnownRef known = e.known;
    if (e.recorded) wait(lock, [&] { return at.reached(); });
    if (known) races().host_knows(known->clock);
    return device_state();
  });
}
ENTRY(cuEventElapsedTime_v2, 12080, (float* milliseconds, CUevent start, CUevent end)) {
  SOFTCUDA_ENTER();
  if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_context());
  const auto lock = lock_work();
  const std::shared_ptr<Event> a = find_event(start), b = find_event(end);
  if (!a || !b || !a->recorded || !b->recorded || ((a->flags | b->flags) & CU_EVENT_DISABLE_TIMING))
    return CUDA_ERROR_INVALID_HANDLE;
  if (!a->at.reached() || !b->at.reached()) return CUDA_ERROR_NOT_READY;
  *milliseconds = static_cast<float>(*b->nanoseconds - *a->nanoseconds) / 1e6F;
  return CUDA_SUCCESS;
}
ENTRY(cuEventElapsedTime, 2000, (float* milliseconds, CUevent start, CUevent end)) {
  return cuEventElapsedTime_v2(milliseconds, start, end);
}

ENTRY(cuStreamBeginCapture_v2, 10010, (CUstream stream, int mode)) {
  SOFTCUDA_ENTER();
  if (mode < 0 || mode > 2) return CUDA_ERROR_INVALID_VALUE;
  return with_stream(stream, [&](auto&, const StreamRef& s) {
    return begin_capture(s, static_cast<CaptureMode>(mode));
  });
}
// The nodes that the first captured ones depend on do not matter: they run earlier in any case.
ENTRY(cuStreamBeginCaptureToGraph, 12030,
      (CUstream stream, Graph* graph, const void* const*, const void*, std::size_t, int mode)) {
  SOFTCUDA_ENTER();
  if (!graph || mode < 0 || mode > 2) return CUDA_ERROR_INVALID_VALUE;
  return with_stream(stream, [&](auto&, const StreamRef& s) {
    return begin_capture(s, static_cast<CaptureMode>(mode), graph);
  });
}
ENTRY(cuStreamEndCapture, 10000, (CUstream stream, Graph** graph)) {
  SOFTCUDA_ENTER();
  return with_stream(stream, [&](auto&, const StreamRef& s) { return end_capture(s, graph); });
}
ENTRY(cuStreamIsCapturing, 10000, (CUstream stream, CUstreamCaptureStatus* status)) {
  SOFTCUDA_ENTER();
  if (!status) return CUDA_ERROR_INVALID_VALUE;
  return with_stream(stream, [&](auto&, const StreamRef& s) {
    if (implicates_legacy(s)) return kCaptureImplicit;
    *status = !s->capture           ? CU_STREAM_CAPTURE_STATUS_NONE
              : s->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                    : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
  });
}
ENTRY(cuStreamGetCaptureInfo_v3, 12030,
      (CUstream stream, CUstreamCaptureStatus* status, std::uint64_t* id, Graph** graph,
       const void** dependencies, const void** edges, std::size_t* count)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(cuStreamIsCapturing(stream, status));
  return with_stream(stream, [&](auto&, const StreamRef& s) {
    if (!s->capture) return CUDA_SUCCESS;
    if (id) *id = s->capture->id;
    if (graph) *graph = &s->capture->graph;
    if (dependencies) *dependencies = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return CUDA_SUCCESS;
  });
}
ENTRY(cuStreamUpdateCaptureDependencies_v2, 12030,
      (CUstream stream, void* const*, const void*, std::size_t, unsigned flags)) {
  SOFTCUDA_ENTER();
  if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
  constexpr auto kIllegalState = static_cast<CUresult>(401);
  return with_stream(
      stream, [&](auto&, const StreamRef& s) { return s->capture ? CUDA_SUCCESS : kIllegalState; });
}
ENTRY(cuThreadExchangeStreamCaptureMode, 10010, (int* mode)) {
  SOFTCUDA_ENTER();
  if (!mode || *mode < 0 || *mode > 2) return CUDA_ERROR_INVALID_VALUE;
  *mode = static_cast<int>(exchange_mode(static_cast<CaptureMode>(*mode)));
  return CUDA_SUCCESS;
}
int softcuda_enqueue(void* stream, const SoftcudaKernel* kernel, void (*run)(void*),
                     void (*drop)(void*), void* data, int waits) {
  const std::shared_ptr<void> owner(data, drop);
  // A kernel not launched through libcudart is launched here: it counts, and may fail.
  static Probe& probe = probe_of("cudaLaunchKernel");
  const Call call(probe);
  if (call.planned()) return call.result();
  RETURN_IF_FAILED(check_context());
  const char* name = intern(kernel->name);
  Accesses accesses;
  for (std::size_t i = 0; i < kernel->count; ++i) {
    const SoftcudaRange& range = kernel->ranges[i];
    const auto begin = reinterpret_cast<std::uintptr_t>(range.begin);
    accesses.push_back(
        {begin, begin + range.bytes, range.written ? Use::kWrite : Use::kRead, name});
  }
  const Work work = [run, owner] {
    run(owner.get());
    return CUDA_SUCCESS;
  };
  return enqueue_on(static_cast<CUstream>(stream), work, std::move(accesses), waits != 0);
}
