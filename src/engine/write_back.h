// Write-back: units whose bytes are valid on both sides, because nothing writes them. The driver
// keeps the host's copy while such a unit is on the device, so it is evicted without a transfer. A
// write drops the host's copy, and the next eviction moves the bytes.
#pragma once
#include <vector>

#include "base/status.h"
#include "engine/engine_state.h"
#include "engine/moves.h"
#include "engine/transfers.h"
#include "engine/zero_copy.h"

namespace umem::engine {

class WriteBack {
 public:
  WriteBack(EngineState& state, Transfers& transfers, Moves& moves, ZeroCopy& zero_copy)
      : state_(state), transfers_(transfers), moves_(moves), zero_copy_(zero_copy) {}

  // Advises the driver that the unit is read-mostly, or takes the advice back.
  Status advise(RangeId id, bool on) { return advise(id, on, false); }
  // Apply the policy's requests: the units that are read-mostly from now on; the units to write
  // back now, and those that will be written.
  void apply_read_mostly();
  void apply_pending();
  // End the advice that the policy caused for the unit, or for all units.
  void end(RangeId id);
  void clear();

 private:
  Status advise(RangeId id, bool on, bool by_policy);
  Status begin(RangeId id);

  EngineState& state_;
  Transfers& transfers_;
  Moves& moves_;
  ZeroCopy& zero_copy_;                     // its advice excludes this one
  std::vector<RangeId> one_, begin_, end_;  // scratch
};

}  // namespace umem::engine
