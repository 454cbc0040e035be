// Zero copy: memory that does not fit is used on the host, over the link. Otherwise the driver
// would bring in each page by a fault and evict another one that the same op needs, for ops that
// loop over their memory once per access.
//
// On a GPU only: the software device sees its page faults, and uses a page on the host if it faults
// repeatedly in one op.
#pragma once
#include <unordered_map>

#include "engine/engine_state.h"
#include "managed/memory_ops.h"

namespace umem::engine {

class ZeroCopy {
 public:
  explicit ZeroCopy(EngineState& state) : state_(state) {}

  // An op uses the unit, which does not fit. False if its pages come by faults.
  bool use(RangeId id);
  // Take the advice back: for units that no op has used so since the last call; for all; for the
  // unit.
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
  bool refused_ = false;  // refused by the driver, and not asked again
  std::unordered_map<RangeId, Advised> advised_;
};

}  // namespace umem::engine
