// Sleep and wake: the device memory of many units is freed at once, and taken again.
//
// A sleeping unit is away like any other: an op that needs it brings it in. So a sleep at the wrong
// time costs time, and changes no result, except for bytes that were to be discarded.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "engine/engine_state.h"
#include "engine/moves.h"
#include "engine/sharing.h"
#include "engine/transfers.h"
#include "engine/write_back.h"

namespace umem::engine {

// A request to free device memory until `wake` or until an op needs it.
struct SleepRequest {
  std::uint32_t tags = 0;  // bits by Tag
  bool discard = false;    // the bytes are lost, instead of kept on the host
  std::uint64_t number = 0;
};

class Sleep {
 public:
  Sleep(EngineState& state, Transfers& transfers, Moves& moves, Sharing& sharing,
        WriteBack& write_back)
      : state_(state),
        transfers_(transfers),
        moves_(moves),
        sharing_(sharing),
        write_back_(write_back) {}

  // Checks the request: kBadState if a running op uses some of the units, kOutOfHostMemory,
  // kNotSupported if memory cannot move. On an error nothing has changed.
  Status check(const SleepRequest& wanted);
  // Submits the moves. `bytes`: the device memory that this frees.
  Status begin(const SleepRequest& wanted, std::size_t& bytes);
  // Waits until the outbound lane has issued all moves; an error if one failed.
  Status finish();
  // Brings back units of the tags that fit, from the sleep of that number or (0) of any, in their
  // order of last use, and all units that the program pinned, evicting others for them.
  // kOutOfDeviceMemory if running ops leave no room for those. `bytes`: the bytes brought back.
  Status wake(std::uint32_t tags, std::uint64_t number, std::size_t& bytes);
  // Bytes that sleep and have not come back.
  std::size_t asleep_bytes() const;
  bool is_asleep(RangeId id) const;

 private:
  // A unit sleeps while it has the same block and was not brought in.
  struct SleepingUnit {
    RangeId id;
    std::uint64_t born, arrival, number;
  };
  bool is_asleep(const SleepingUnit& unit) const;
  std::vector<RangeId> units_to_sleep(const SleepRequest& wanted) const;
  std::size_t missing_on_host(const std::vector<RangeId>& ids) const;
  Status sleep_units(const std::vector<RangeId>& ids);
  Status discard_units(const std::vector<RangeId>& ids);
  std::vector<SleepingUnit> take_sleeping(std::uint32_t tags, std::uint64_t number);

  EngineState& state_;
  Transfers& transfers_;
  Moves& moves_;
  Sharing& sharing_;
  WriteBack& write_back_;
  std::vector<SleepingUnit> sleeping_;
  std::uint64_t failures_before_ = 0;  // the outbound lane's failures before the last sleep
};

}  // namespace umem::engine
