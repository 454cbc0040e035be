// Graphs, the conditional nodes in them, and the user objects that they keep.
#include "common.h"

using softcudart::finish;
using softcudart::out;

RUNTIME_API cudaGraphCreate(cudaGraph_t* graph, unsigned flags) {
  RUNTIME_ENTER();
  return finish(cuGraphCreate(out(graph), flags));
}
RUNTIME_API cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long flags) {
  RUNTIME_ENTER();
  return finish(cuGraphInstantiateWithFlags(out(executable), graph, flags));
}
RUNTIME_API cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
RUNTIME_API cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  RUNTIME_ENTER();
  return finish(cuGraphLaunch(executable, stream));
}
RUNTIME_API cudaGraphDestroy(cudaGraph_t graph) {
  RUNTIME_ENTER();
  return finish(cuGraphDestroy(graph));
}
RUNTIME_API cudaGraphExecDestroy(cudaGraphExec_t executable) {
  RUNTIME_ENTER();
  return finish(cuGraphExecDestroy(executable));
}
// Only the number of nodes is known; torch uses it to warn about an empty graph.
RUNTIME_API cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  RUNTIME_ENTER();
  if (nodes) return finish(cudaErrorNotSupported);
  *count = softcuda_graph_nodes(graph);
  return finish(0);
}
RUNTIME_API cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*,
                                         std::size_t*) {
  RUNTIME_ENTER();
  return finish(cudaErrorNotSupported);
}
RUNTIME_API cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) {
  RUNTIME_ENTER();
  return finish(cudaErrorNotSupported);
}

RUNTIME_API cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle* handle, cudaGraph_t graph,
                                             unsigned value, unsigned flags) {
  RUNTIME_ENTER();
  return finish(cuGraphConditionalHandleCreate(handle, graph, nullptr, value, flags));
}
RUNTIME_API cudaGraphAddNode(cudaGraphNode_t* node, cudaGraph_t graph,
                             const cudaGraphNode_t* dependencies, const cudaGraphEdgeData* edges,
                             std::size_t count, cudaGraphNodeParams* params) {
  RUNTIME_ENTER();
  return finish(cuGraphAddNode_v2(out(node), graph, dependencies, edges, count, params));
}

RUNTIME_API cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t destroy,
                                 unsigned count, unsigned flags) {
  RUNTIME_ENTER();
  return finish(cuUserObjectCreate(out(object), data, destroy, count, flags));
}
RUNTIME_API cudaUserObjectRetain(cudaUserObject_t object, unsigned count) {
  RUNTIME_ENTER();
  return finish(cuUserObjectRetain(object, count));
}
RUNTIME_API cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  RUNTIME_ENTER();
  return finish(cuUserObjectRelease(object, count));
}
RUNTIME_API cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count,
                                      unsigned flags) {
  RUNTIME_ENTER();
  return finish(cuGraphRetainUserObject(graph, object, count, flags));
}
RUNTIME_API cudaGraphReleaseUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count) {
  RUNTIME_ENTER();
  return finish(cuGraphReleaseUserObject(graph, object, count));
}

// cudaMallocAsync returns ordinary device memory while a stream captures: graphs have none.
RUNTIME_API cudaDeviceGetGraphMemAttribute(int device, cudaGraphMemAttributeType attribute,
                                           void* value) {
  RUNTIME_ENTER();
  if (!value || attribute > cudaGraphMemAttrReservedMemHigh) return finish(cudaErrorInvalidValue);
  if (device < 0 || device >= softcuda_device_count()) return finish(cudaErrorInvalidDevice);
  *static_cast<std::uint64_t*>(value) = 0;
  return finish(0);
}
// A high watermark can only be set to zero.
RUNTIME_API cudaDeviceSetGraphMemAttribute(int device, cudaGraphMemAttributeType attribute,
                                           void* value) {
  RUNTIME_ENTER();
  const bool high =
      attribute == cudaGraphMemAttrUsedMemHigh || attribute == cudaGraphMemAttrReservedMemHigh;
  if (!value || !high || *static_cast<std::uint64_t*>(value) != 0)
    return finish(cudaErrorInvalidValue);
  if (device < 0 || device >= softcuda_device_count()) return finish(cudaErrorInvalidDevice);
  return finish(0);
}
