// The runtime as a program would drive it: blocks, ops and steps on a software device in virtual
// time. The player of a step's columns (step_player.h) calls it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/options.h"
#include "base/status.h"
#include "runtime/alloc.h"
#include "runtime/ops.h"
#include "runtime/reports.h"
#include "runtime/stats.h"
#include "soft/device.h"

namespace umem::replay {

// Figures of a step. Times are virtual microseconds; bytes and counts as in runtime/stats.def.
struct Figures {
  double step_us = 0;
  double compute_us = 0;  // of the ops themselves
  double stall_us = 0;    // the rest of the step
  double host_us = 0;     // of the host's work
  std::uint64_t bytes_in = 0, bytes_out = 0, bytes_discarded = 0;
  std::uint64_t faults = 0, evictions = 0, prefetches = 0, prefetched_unused_bytes = 0;
  std::uint64_t peak_resident_bytes = 0, plan_hits = 0, plan_misses = 0;
  std::uint64_t peak_host_bytes = 0;  // of all steps so far
};

class Machine {
 public:
  // Starts the runtime on the software device that the options say, which must have been off.
  Status open(const Options& options);
  // All blocks were released.
  Status close();

  // kOutOfDeviceMemory or kOutOfHostMemory with the runtime's own reason. Null for 0 bytes.
  Result<void*> allocate(std::size_t bytes, residency::Tag tag, residency::Family family);
  void release(void* ptr) { runtime::release(ptr); }

  // An op: its inputs, `begin`, allocations and releases, its accesses, `end`. The program waits
  // for it: host time is device time afterwards.
  std::vector<runtime::Input>& inputs() { return inputs_; }
  std::vector<soft::Access>& accesses() { return accesses_; }
  void begin(const char* name);  // valid until `end`
  Status end(double us);
  // In place of `end`, after an error.
  void abandon() { runtime::op_end(&op_, residency::Tag::kCount); }

  // Between two ops. Sends bytes of a block to the host; when they have arrived.
  Result<double> send_to_host(std::uintptr_t ptr, std::size_t bytes);
  // As soft::host_work, on bytes that it sends to the host first.
  Status host_work(std::uintptr_t ptr, std::size_t bytes, double ready_us, double us, double due);

  double now_us() const;  // virtual time
  // Virtual time since the step began.
  double step_time_us() const;
  void end_step();

  const Figures& figures() const { return figures_; }  // of the last complete step
  std::uint64_t steps() const { return steps_; }

 private:
  void start_step(const runtime::Stats& now);

  runtime::Op op_;
  std::vector<runtime::Input> inputs_;
  std::vector<soft::Access> accesses_;
  runtime::SessionRecord session_;  // of the program, which the replay does not change
  runtime::Stats before_;
  Figures figures_;
  double step_start_us_ = 0, compute_us_ = 0, worked_us_ = 0;
  std::uint64_t steps_ = 0;
};

}  // namespace umem::replay
