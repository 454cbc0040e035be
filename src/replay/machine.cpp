#include "replay/machine.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/thread_role.h"
#include "base/units.h"
#include "runtime/hints.h"
#include "runtime/runtime.h"
#include "runtime/steps.h"

namespace umem::replay {

using residency::Family;
using residency::Tag;

Status Machine::open(const Options& options) {
  if (runtime::running())
    return {Code::kBadState, "umem is on, and a replay needs the runtime; call umem.disable()"};
  UMEM_RETURN_IF_ERROR(runtime::stop());  // closes what a session left open without live blocks
  if (runtime::current_driver())
    return {Code::kBadState,
            "tensors of an earlier session are still alive; free them, or replay in a new process"};
  if (options.device != "soft")
    return {Code::kInvalidArgument, "a replay runs on the software device; device is '" +
                                        options.device + "', allowed: soft"};
  Options timed = options;
  timed.timed = true;
  session_ = runtime::session_record();
  if (Status status = runtime::start(timed); !status.ok()) {
    runtime::restore(std::move(session_));
    return status;
  }
  runs_steps();
  start_step(runtime::stats());
  return {};
}

Status Machine::close() {
  Status status = runtime::stop();
  if (status.ok()) runtime::restore(std::move(session_));
  return status;
}

Result<void*> Machine::allocate(std::size_t bytes, Tag tag, Family family) {
  runtime::Failure failure;
  void* ptr = runtime::allocate(bytes, 0, 0, &failure);
  if (failure.code != 0) return Status(static_cast<Code>(failure.code), failure.message);
  // Small blocks share a segment, which has no label of theirs.
  if (bytes < kPageBytes) return ptr;
  runtime::label(ptr, tag == Tag::kCount ? Tag::kTemp : tag,
                 family == Family::kCount ? Family::kNone : family);
  return ptr;
}

void Machine::begin(const char* name) {
  op_.name = name;
  runtime::op_begin(&op_, inputs_.data(), inputs_.size());
}

Status Machine::end(double us) {
  Status accessed = soft::access(accesses_.data(), accesses_.size());
  soft::launch(nullptr, us);
  runtime::op_end(&op_, Tag::kCount);
  soft::wait();
  compute_us_ += us;
  return accessed;
}

Result<double> Machine::send_to_host(std::uintptr_t ptr, std::size_t bytes) {
  UMEM_RETURN_IF_ERROR(runtime::evict({{ptr, bytes}}));
  return soft::arrived_us();
}

Status Machine::host_work(std::uintptr_t ptr, std::size_t bytes, double ready_us, double us,
                          double due) {
  const std::uint64_t copied = runtime::stats().bytes_out;
  Result<double> sent = send_to_host(ptr, bytes);
  if (!sent.ok()) return sent.take_status();
  if (runtime::stats().bytes_out > copied) ready_us = std::max(ready_us, sent.value());
  worked_us_ += us;
  return soft::host_work(ptr, bytes, std::max(ready_us, soft::now_us()), us, due);
}

void Machine::start_step(const runtime::Stats& now) {
  before_ = now;
  step_start_us_ = soft::now_us();
  compute_us_ = worked_us_ = 0;
  runtime::reset_peak_stats();
}

double Machine::now_us() const {
  return soft::now_us();
}

double Machine::step_time_us() const {
  return now_us() - step_start_us_;
}

void Machine::end_step() {
  const runtime::Stats now = runtime::stats();
  const double step_us = step_time_us();
  const double stall_us = std::max(0.0, step_us - compute_us_);
  figures_ = {step_us,
              compute_us_,
              stall_us,
              worked_us_,
              now.bytes_in - before_.bytes_in,
              now.bytes_out - before_.bytes_out,
              now.bytes_discarded - before_.bytes_discarded,
              now.faults - before_.faults,
              now.evictions - before_.evictions,
              now.prefetches - before_.prefetches,
              now.prefetched_unused_bytes - before_.prefetched_unused_bytes,
              now.peak_resident_bytes,
              now.plan_hits - before_.plan_hits,
              now.plan_misses - before_.plan_misses,
              std::max<std::uint64_t>(figures_.peak_host_bytes, now.peak_host_bytes)};
  ++steps_;
  start_step(now);
  runtime::step();  // what it makes the engine do belongs to the next one
}

}  // namespace umem::replay
