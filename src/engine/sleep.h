// Sleep and wake: the device memory of many units is given back at once, and taken again.
//
// A unit that sleeps is one that is away like any other: an op that needs it brings it in. So a
// sleep at the wrong time costs time, and never a result, but for what was to be discarded.
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

// What a sleep is to give back of the device, until `wake` or until an op needs it.
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

  // Why a sleep cannot be: kBadState when a running op uses some of the units, kOutOfHostMemory,
  // kNotSupported where memory cannot move. Nothing changed then.
  Status check(const SleepRequest& wanted);
  // Submits the moves. `bytes`: of device memory that this gives back.
  Status begin(const SleepRequest& wanted, std::size_t& bytes);
  // Waits until the lane out has issued all that it was given; an error if any of it failed.
  Status finish();
  // Brings back what fits of the tags, from the sleep of that number or (0) of any, so that units
  // are by last use as they were; and all that the program pinned, in whoever's place.
  // kOutOfDeviceMemory where running ops leave it none. `bytes`: how many that is.
  Status wake(std::uint32_t tags, std::uint64_t number, std::size_t& bytes);
  // Of what a sleep sent away: bytes that have not come back.
  std::size_t asleep_bytes() const;
  bool is_asleep(RangeId id) const;

 private:
  // A unit sleeps as long as it is the same block and was not brought in since.
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
  std::uint64_t failures_before_ = 0;  // of the lane out, before the last sleep
};

}  // namespace umem::engine
