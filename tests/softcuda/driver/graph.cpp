#include "graph.h"

#include <thread>

#include "entry.h"

namespace softcuda {
namespace {

CUresult run(const Graph& graph) {
  for (const Work& node : graph.nodes) RETURN_IF_FAILED(node());
  return CUDA_SUCCESS;
}

struct Conditional {
  ConditionalType type;
  const Condition* condition;
  std::vector<Graph> bodies;
  std::vector<Graph*> handles;

  CUresult run_body(std::size_t number) const {
    return number < bodies.size() ? run(bodies[number]) : CUDA_SUCCESS;
  }
  CUresult run_chosen() const {
    switch (type) {
      case ConditionalType::kIf:
        return run_body(condition->value != 0 ? 0 : 1);
      case ConditionalType::kWhile:
        while (condition->value != 0) RETURN_IF_FAILED(run_body(0));
        return CUDA_SUCCESS;
      case ConditionalType::kSwitch:
        return run_body(condition->value);
    }
    return CUDA_ERROR_INVALID_VALUE;
  }
};

}  // namespace

// The last reference may be dropped with the work lock held, and the destructor may take any lock.
UserObject::~UserObject() {
  std::thread(destroy, data).detach();
}

void References::add(const std::shared_ptr<UserObject>& object, unsigned count) {
  Held& held = held_[object.get()];
  held.object = object;
  held.count += count;
}

bool References::drop(UserObject* object, unsigned count) {
  const auto found = held_.find(object);
  if (found == held_.end() || found->second.count < count) return false;
  found->second.count -= count;
  if (found->second.count == 0) held_.erase(found);
  return true;
}

std::shared_ptr<UserObject> References::find(UserObject* object) const {
  const auto found = held_.find(object);
  return found == held_.end() ? nullptr : found->second.object;
}

Graph** add_conditional(Graph& graph, ConditionalType type, const Condition& condition,
                        unsigned size) {
  auto node = std::make_shared<Conditional>();
  node->type = type;
  node->condition = &condition;
  node->bodies.resize(size);
  for (Graph& body : node->bodies) {
    body.conditions = graph.conditions;
    node->handles.push_back(&body);
  }
  graph.nodes.push_back([node] { return node->run_chosen(); });
  return node->handles.data();
}

CUresult launch(const Graph& graph) {
  for (const auto& condition : *graph.conditions)
    if (condition->at_launch) condition->value = *condition->at_launch;
  return run(graph);
}

}  // namespace softcuda
