// Moves within the budget: brings units in, and evicts others for them.
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

  // True if the unit fits into the host budget; dead ranges are given back first.
  bool fits_on_host(RangeId id);
  void release_cached() { release_cached_(); }
  // True if `bytes` more fit into the budget. Makes as much room as there is in any case.
  bool make_room(std::size_t bytes);
  // Starts evicting before room is short, if evictions run concurrently with compute, and if live
  // bytes were evicted in this step or the previous one: a program that fits moves nothing.
  void evict_ahead();
  // Bytes that `drop_ahead` keeps free; 0 unless the memory is mapped.
  std::size_t room_ahead() const;
  // Drops dead bytes before room is short, while a plan moves others: a new block need not wait for
  // the work that used them.
  void drop_ahead();
  void step_ended();
  // Parts a joined layout (sharing.h); what the program keeps comes back at once. With `leaving`,
  // the device is at rest, and all but those come back; `lost` says that they lose their bytes.
  Status part_layout(const std::vector<RangeId>* leaving = nullptr, bool lost = false);
  // The units to evict first, if they may be evicted, until the next call.
  void set_preferred_victims(std::vector<RangeId> ids) { preferred_victims_ = std::move(ids); }
  Status populate(RangeId id);
  // Skips units in use by an op, and units that the host has no room for.
  Status send_out(const std::vector<RangeId>& victims);
  // Units that are away as far as umem knows: page faults that it does not see may have brought
  // them.
  Status send_again(const std::vector<RangeId>& ids);
  // Without a consumer nothing waits for the bytes yet. Units that do not fit stay away.
  Status fetch(const std::vector<RangeId>& ids, const cu::CUstream* consumer);
  // Brings the unit in without evicting. If dead bytes cannot be dropped, it comes when an op needs
  // it.
  void bring(RangeId id);
  // True if mapped units are away after all, as they could not be brought in ahead.
  bool note_failures();
  // kOutOfDeviceMemory if the unit does not fit.
  Status prefetch(RangeId id, const cu::CUstream* consumer = nullptr);

 private:
  bool used_in_place(RangeId id) const;
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
  // Live bytes were evicted in this step, or in the previous one.
  bool short_now_ = false, short_before_ = false;
  // Scratch, so that an op makes no heap allocation.
  std::vector<RangeId> one_, victims_, moved_, dropped_, preferred_victims_;
};

}  // namespace umem::engine
