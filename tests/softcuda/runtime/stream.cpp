// Streams, events, host functions and capture.
#include <cstdio>
#include <memory>

#include "common.h"

using softcudart::finish;
using softcudart::out;

namespace {

struct Callback {
  cudaStreamCallback_t function;
  cudaStream_t stream;
  void* data;
};
void run_callback(void* data) {
  const std::unique_ptr<Callback> callback(static_cast<Callback*>(data));
  callback->function(callback->stream, cudaSuccess, callback->data);
}

}  // namespace

RUNTIME_API cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  RUNTIME_ENTER();
  return finish(cuStreamCreateWithPriority(out(stream), flags, priority));
}
RUNTIME_API cudaStreamCreate(cudaStream_t* stream) {
  RUNTIME_ENTER();
  return finish(cuStreamCreateWithPriority(out(stream), 0, 0));
}
RUNTIME_API cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  RUNTIME_ENTER();
  return finish(cuStreamCreateWithPriority(out(stream), flags, 0));
}
RUNTIME_API cudaStreamDestroy(cudaStream_t stream) {
  RUNTIME_ENTER();
  return finish(cuStreamDestroy_v2(stream));
}
RUNTIME_API cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  RUNTIME_ENTER();
  return finish(cuStreamGetPriority(stream, priority));
}
RUNTIME_API cudaStreamSynchronize(cudaStream_t stream) {
  RUNTIME_ENTER();
  return finish(cuStreamSynchronize(stream));
}
RUNTIME_API cudaStreamQuery(cudaStream_t stream) {
  RUNTIME_ENTER();
  return finish(cuStreamQuery(stream));
}
RUNTIME_API cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  RUNTIME_ENTER();
  return finish(cuStreamWaitEvent(stream, event, flags));
}
RUNTIME_API cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  RUNTIME_ENTER();
  return finish(cuLaunchHostFunc(stream, function, data));
}
RUNTIME_API cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data,
                                  unsigned flags) {
  RUNTIME_ENTER();
  if (!function || flags != 0) return finish(cudaErrorInvalidValue);
  auto callback = std::make_unique<Callback>(Callback{function, stream, data});
  const int error = cuLaunchHostFunc(stream, run_callback, callback.get());
  if (!error) callback.release();
  return finish(error);
}

RUNTIME_API cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  RUNTIME_ENTER();
  return finish(cuEventCreate(out(event), flags));
}
RUNTIME_API cudaEventCreate(cudaEvent_t* event) {
  RUNTIME_ENTER();
  return finish(cuEventCreate(out(event), 0));
}
RUNTIME_API cudaEventDestroy(cudaEvent_t event) {
  RUNTIME_ENTER();
  return finish(cuEventDestroy_v2(event));
}
RUNTIME_API cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  RUNTIME_ENTER();
  return finish(cuEventRecord(event, stream));
}
RUNTIME_API cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  RUNTIME_ENTER();
  return finish(cuEventRecord(event, stream));
}
RUNTIME_API cudaEventQuery(cudaEvent_t event) {
  RUNTIME_ENTER();
  return finish(cuEventQuery(event));
}
RUNTIME_API cudaEventSynchronize(cudaEvent_t event) {
  RUNTIME_ENTER();
  return finish(cuEventSynchronize(event));
}
RUNTIME_API cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  RUNTIME_ENTER();
  return finish(cuEventElapsedTime_v2(milliseconds, start, end));
}

RUNTIME_API cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  RUNTIME_ENTER();
  return finish(cuStreamBeginCapture_v2(stream, mode));
}
RUNTIME_API cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                          const cudaGraphNode_t* dependencies,
                                          const cudaGraphEdgeData* edges, std::size_t count,
                                          cudaStreamCaptureMode mode) {
  RUNTIME_ENTER();
  return finish(cuStreamBeginCaptureToGraph(stream, graph, dependencies, edges, count, mode));
}
RUNTIME_API cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t* dependencies,
                                                const cudaGraphEdgeData* edges, std::size_t count,
                                                unsigned flags) {
  RUNTIME_ENTER();
  return finish(cuStreamUpdateCaptureDependencies_v2(stream, dependencies, edges, count, flags));
}
RUNTIME_API cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  RUNTIME_ENTER();
  return finish(cuStreamEndCapture(stream, out(graph)));
}
RUNTIME_API cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  RUNTIME_ENTER();
  int value = 0;
  const int error = cuStreamIsCapturing(stream, &value);
  *status = static_cast<cudaStreamCaptureStatus>(value);
  return finish(error);
}
RUNTIME_API cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, std::size_t* count) {
  RUNTIME_ENTER();
  int value = 0;
  const int error = cuStreamGetCaptureInfo_v3(stream, &value, id, out(graph),
                                              reinterpret_cast<const void**>(dependencies),
                                              reinterpret_cast<const void**>(edges), count);
  *status = static_cast<cudaStreamCaptureStatus>(value);
  return finish(error);
}
RUNTIME_API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  RUNTIME_ENTER();
  int value = *mode;
  const int error = cuThreadExchangeStreamCaptureMode(&value);
  *mode = static_cast<cudaStreamCaptureMode>(value);
  return finish(error);
}
