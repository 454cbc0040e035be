// Graphs: their nodes run in the order of capture or addition, regardless of their dependencies.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "work.h"

namespace softcuda {

// The value of a conditional handle: kernels set it, conditional nodes read it.
struct Condition {
  unsigned value = 0;
  std::optional<unsigned> at_launch;
};

// Destroyed, on a separate thread, with the last reference of the program, a graph or a launch.
struct UserObject {
  void* data;
  void (*destroy)(void*);

  UserObject(void* owned, void (*destructor)(void*)) : data(owned), destroy(destructor) {}
  ~UserObject();
  UserObject(const UserObject&) = delete;
  UserObject& operator=(const UserObject&) = delete;
};

// Counted references to user objects, of one holder.
class References {
 public:
  void add(const std::shared_ptr<UserObject>& object, unsigned count);
  // False if there are fewer; none is dropped then.
  bool drop(UserObject* object, unsigned count);
  std::shared_ptr<UserObject> find(UserObject* object) const;

 private:
  struct Held {
    std::shared_ptr<UserObject> object;
    unsigned count = 0;
  };
  std::map<UserObject*, Held> held_;
};

struct Graph {
  std::vector<Work> nodes;
  Accesses accesses;  // of all nodes, except the bodies of conditional ones
  References objects;
  // Shared with instances of the graph, and with the bodies of its conditional nodes.
  std::shared_ptr<std::vector<std::unique_ptr<Condition>>> conditions =
      std::make_shared<std::vector<std::unique_ptr<Condition>>>();
};

enum class ConditionalType : int { kIf = 0, kWhile = 1, kSwitch = 2 };

// Adds a node that runs one of `size` new graphs, or none. They are empty, and belong to the node.
Graph** add_conditional(Graph& graph, ConditionalType type, const Condition& condition,
                        unsigned size);
CUresult launch(const Graph& graph);

}  // namespace softcuda
