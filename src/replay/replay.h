// A replay: a step's columns on the runtime, in virtual time, as often as wanted.
//
// One at a time in a process, and only while umem is off: the runtime is one. Not thread-safe, and
// all calls come from one thread.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/export.h"
#include "base/options.h"
#include "base/status.h"
#include "replay/machine.h"
#include "replay/step_player.h"

namespace umem::replay {

struct Progress {
  std::uint64_t steps = 0, events = 0;
  double seconds = 0;  // of real time, inside of these calls
};

class Replay {
 public:
  // kBadState while umem is on, or another replay is open.
  UMEM_API static Result<std::unique_ptr<Replay>> open(const Options& options);
  UMEM_API ~Replay();
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  // Allocates what is alive when the step begins. kInvalidArgument where the columns are no step;
  // out of memory where the runtime refuses an allocation. Nothing but `close` is possible then.
  UMEM_API Status set_step(StepColumns columns);
  UMEM_API Status run_step(std::uint64_t repeats);
  // The address of a tensor of the step; 0 if the tensor is not alive now.
  UMEM_API Result<std::uintptr_t> address(std::size_t tensor) const;

  // [n] The end of each op in the last step run, in µs since the step began; empty before.
  UMEM_API const std::vector<double>& op_end_us() const;
  // As `run_step(1)`, with a log of what happens to pages.
  UMEM_API Status run_logged();
  // That log of the last step; times are since it began. Transfers of the step before that end in
  // this one come first, with the operation -1, if that step was logged too. It settles the turns
  // of the host's work, which later steps could still change: no step is run after it.
  UMEM_API Result<soft::Moves> moves();
  // [m] The address that each tensor had in the last step, 0 without one.
  UMEM_API std::vector<std::uintptr_t> placed() const;
  UMEM_API Figures figures() const { return machine_.figures(); }
  UMEM_API Progress progress() const { return {machine_.steps(), events_, seconds_}; }
  // Releases all blocks and closes the device. Idempotent.
  UMEM_API Status close();

 private:
  Replay() = default;
  // Times the call, and keeps the replay from going on after an error.
  template <class Call>
  Status timed(Call call);
  Status run_once();

  Machine machine_;
  std::optional<StepPlayer> step_;
  std::uint64_t events_ = 0;
  double seconds_ = 0;
  soft::Moves before_, logged_;  // of the last two steps, as far as they were logged
  double begin_us_ = 0;          // when the last one began
  bool failed_ = false, open_ = false;
};

}  // namespace umem::replay
