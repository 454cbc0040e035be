// Zero copy: what does not fit beside an op is used on the host, over the link. Else the driver
// would bring each page by a fault and drive out another that the same op needs; where an op goes
// around its memory, that is once per access and has no end.
//
// On a GPU only: the software device sees its page faults, and does so where a page comes again and
// again in one op.
#pragma once
#include <unordered_map>

#include "engine/engine_state.h"
#include "managed/memory_ops.h"

namespace umem::engine {

class ZeroCopy {
 public:
  explicit ZeroCopy(EngineState& state) : state_(state) {}

  // An op uses the unit, which does not fit. False where its pages come by faults.
  bool use(RangeId id);
  // Takes the advice back: of what no op has used so since the last call; of all; of the unit.
  void step_ended();
  void clear();
  void end(RangeId id);
  void forget(RangeId id) { advised_.erase(id); }
  bool contains(RangeId id) const { return !advised_.empty() && advised_.contains(id); }

 private:
  struct Advised {
    managed::MemSpan span;
    bool used = false;  // in this step
  };

  EngineState& state_;
  bool refused_ = false;  // by the driver: not asked again
  std::unordered_map<RangeId, Advised> advised_;
};

}  // namespace umem::engine
