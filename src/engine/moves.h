// Moves within the budget: units come in, and others leave for them.
#pragma once
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/engine_state.h"
#include "engine/sharing.h"
#include "engine/transfers.h"

namespace umem::engine {

class Moves {
 public:
  // `release_cached`: as in Engine.
  Moves(EngineState& state, Transfers& transfers, Sharing& sharing,
        std::function<void()> release_cached)
      : state_(state),
        transfers_(transfers),
        sharing_(sharing),
        release_cached_(std::move(release_cached)) {}

  // Whether the unit may be sent out within the host budget; what dead ranges hold there goes
  // first.
  bool fits_on_host(RangeId id);
  void release_cached() { release_cached_(); }
  // True when `bytes` more fit into the budget; makes what room there is in any case.
  bool make_room(std::size_t bytes);
  // Starts evicting before room is short, where that happens beside compute, and where bytes of
  // live blocks have had to leave in this step or the one before: a program that fits moves
  // nothing.
  void evict_ahead();
  void step_ended();
  // The units that leave first when room is made next, if they may. Until the next call.
  void set_preferred_victims(std::vector<RangeId> ids) { preferred_victims_ = std::move(ids); }
  Status populate(RangeId id);
  // Without those in use by an op, and those that the host has no room for.
  Status send_out(const std::vector<RangeId>& victims);
  // Without a consumer nothing waits for the bytes yet. What does not fit stays away.
  Status fetch(const std::vector<RangeId>& ids, const cu::CUstream* consumer);
  // Without evicting: where dead bytes cannot be dropped the unit comes when an op needs it.
  void bring(RangeId id);
  // kOutOfDeviceMemory where the unit does not fit.
  Status prefetch(RangeId id);

 private:
  Status wait_for_space(Lane& lane);
  void discard_dead(std::size_t bytes);
  void drop_dead(std::size_t bytes);
  void send_dead_out(std::size_t bytes);
  Status send_back(const std::vector<RangeId>& ids, State before);
  void evict(std::size_t wanted);
  void evict_preferred(std::size_t wanted);

  EngineState& state_;
  Transfers& transfers_;
  Sharing& sharing_;
  std::function<void()> release_cached_;
  bool short_now_ = false, short_before_ = false;  // live bytes had to leave: this step, the last
  // Scratch, so that an op costs no malloc.
  std::vector<RangeId> one_, victims_, moved_, dropped_, preferred_victims_;
};

}  // namespace umem::engine
