// Graphs, the conditional nodes in them, and the user objects that they keep.
#include "capture.h"
#include "entry.h"
#include "graph.h"
#include "softcuda.h"

using namespace softcuda;  // NOLINT

namespace {

constexpr int kConditionalNode = 13;
constexpr unsigned kAssignDefault = 1;  // CU_GRAPH_COND_ASSIGN_DEFAULT
constexpr unsigned kMove = 1;           // CU_GRAPH_USER_OBJECT_MOVE

// CUgraphNodeParams, as far as conditional nodes use it.
struct NodeParams {
  int type, reserved[3];
  std::uint64_t handle;
  int conditional_type;
  unsigned size;
  Graph** bodies;
};

// The program's own references.
References& held_by_program() {
  static auto* references = new References;
  return *references;
}

CUresult valid(bool condition) {
  return condition ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

ENTRY(cuGraphCreate, 10000, (Graph * *graph, unsigned flags)) {
  SOFTCUDA_ENTER();
  if (!graph || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  *graph = new Graph;
  return CUDA_SUCCESS;
}
ENTRY(cuGraphInstantiateWithFlags, 11040, (Graph * *executable, Graph* graph, std::uint64_t)) {
  SOFTCUDA_ENTER();
  if (!executable || !graph) return CUDA_ERROR_INVALID_VALUE;
  const auto lock = lock_work();
  *executable = new Graph(*graph);
  return CUDA_SUCCESS;
}
ENTRY(cuGraphLaunch, 10000, (Graph * executable, CUstream stream)) {
  SOFTCUDA_ENTER();
  if (!executable) return CUDA_ERROR_INVALID_HANDLE;
  RETURN_IF_FAILED(check_context());
  return enqueue_on(stream, [graph = *executable] { return launch(graph); }, executable->accesses);
}
ENTRY(cuGraphDestroy, 10000, (Graph * graph)) {
  SOFTCUDA_ENTER();
  const auto lock = lock_work();
  delete graph;
  return CUDA_SUCCESS;
}
ENTRY(cuGraphExecDestroy, 10000, (Graph * executable)) {
  SOFTCUDA_ENTER();
  const auto lock = lock_work();
  delete executable;
  return CUDA_SUCCESS;
}

ENTRY(cuGraphConditionalHandleCreate, 12030,
      (Condition * *handle, Graph* graph, CUcontext, unsigned value, unsigned flags)) {
  SOFTCUDA_ENTER();
  if (!handle || !graph || (flags & ~kAssignDefault)) return CUDA_ERROR_INVALID_VALUE;
  const auto lock = lock_work();
  auto& made = graph->conditions->emplace_back(std::make_unique<Condition>());
  if (flags & kAssignDefault) made->at_launch = value;
  *handle = made.get();
  return CUDA_SUCCESS;
}
ENTRY(cuGraphAddNode_v2, 12030,
      (void** node, Graph* graph, const void* const*, const void*, std::size_t,
       NodeParams* params)) {
  SOFTCUDA_ENTER();
  if (!node || !graph || !params) return CUDA_ERROR_INVALID_VALUE;
  if (params->type != kConditionalNode) return CUDA_ERROR_NOT_SUPPORTED;
  const auto type = static_cast<ConditionalType>(params->conditional_type);
  const unsigned most = type == ConditionalType::kWhile ? 1
                        : type == ConditionalType::kIf  ? 2
                                                        : ~0U;
  if (params->conditional_type < 0 || type > ConditionalType::kSwitch || params->size < 1 ||
      params->size > most || !params->handle)
    return CUDA_ERROR_INVALID_VALUE;
  const auto lock = lock_work();
  const auto& condition = *reinterpret_cast<const Condition*>(params->handle);
  params->bodies = add_conditional(*graph, type, condition, params->size);
  *node = params->bodies;
  return CUDA_SUCCESS;
}

ENTRY(cuUserObjectCreate, 11030,
      (UserObject * *object, void* data, void (*destroy)(void*), unsigned count, unsigned flags)) {
  SOFTCUDA_ENTER();
  constexpr unsigned kNoDestructorSync = 1;  // must be given
  if (!object || !destroy || count == 0 || flags != kNoDestructorSync)
    return CUDA_ERROR_INVALID_VALUE;
  const auto made = std::make_shared<UserObject>(data, destroy);
  const auto lock = lock_work();
  held_by_program().add(made, count);
  *object = made.get();
  return CUDA_SUCCESS;
}
ENTRY(cuUserObjectRetain, 11030, (UserObject * object, unsigned count)) {
  SOFTCUDA_ENTER();
  const auto lock = lock_work();
  const std::shared_ptr<UserObject> held = held_by_program().find(object);
  if (!held || count == 0) return CUDA_ERROR_INVALID_VALUE;
  held_by_program().add(held, count);
  return CUDA_SUCCESS;
}
ENTRY(cuUserObjectRelease, 11030, (UserObject * object, unsigned count)) {
  SOFTCUDA_ENTER();
  const auto lock = lock_work();
  return valid(count != 0 && held_by_program().drop(object, count));
}
ENTRY(cuGraphRetainUserObject, 11030,
      (Graph * graph, UserObject* object, unsigned count, unsigned flags)) {
  SOFTCUDA_ENTER();
  const auto lock = lock_work();
  const std::shared_ptr<UserObject> held = held_by_program().find(object);
  if (!graph || !held || count == 0 || (flags & ~kMove)) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & kMove) && !held_by_program().drop(object, count)) return CUDA_ERROR_INVALID_VALUE;
  graph->objects.add(held, count);
  return CUDA_SUCCESS;
}
ENTRY(cuGraphReleaseUserObject, 11030, (Graph * graph, UserObject* object, unsigned count)) {
  SOFTCUDA_ENTER();
  const auto lock = lock_work();
  return valid(graph && count != 0 && graph->objects.drop(object, count));
}

std::size_t softcuda_graph_nodes(void* graph) {
  return static_cast<Graph*>(graph)->nodes.size();
}
void softcuda_set_condition(std::uint64_t handle, unsigned value) {
  reinterpret_cast<Condition*>(handle)->value = value;
}
