#include "runtime/steps.h"

#include <bit>

#include "base/thread_role.h"
#include "runtime/deferred.h"
#include "runtime/device_lock.h"
#include "runtime/recorder_lock.h"
#include "runtime/state.h"
#include "soft/fault_handler.h"
#include "soft/interpose.h"

namespace umem::runtime {

// With several devices, each step ends on the next thread that uses the device: this thread may
// have to run first before another device's lock is released.
static void step_devices(State& s) {
  if (s.forked) return;
  const DeviceMask opened = s.opened;  // once: another thread may close the last device
  each_ordinal(opened, [&](int ordinal) { ++s.slot(ordinal).steps; });
  if (!std::has_single_bit(opened)) return;
  Slot& only = s.slot(std::countr_zero(opened));
  if (const DeviceLock lock(only, std::try_to_lock); lock.held()) end_steps(only);
}

static void end_step(State& s) {
  if (s.captures > 0) return;  // captured work does not run now, and must not be waited for
  runs_steps();
  ++s.steps;
  s.unmanaged.step_ended();
  step_devices(s);
  if (trace::recording()) RecorderLock(s)->step();
  if (s.open() && s.faults_in_process) {
    // Libraries loaded and handlers installed since the last step must not hide page faults from
    // umem.
    soft::install_interposers();
    soft::install_fault_handler();
  }
  if (auto* listener = s.step_listener.load()) listener();
}

void step() noexcept {
  State& s = state();
  s.steps_given = true;
  end_step(s);
}

void guess_step() noexcept {
  State& s = state();
  if (!s.steps_given) end_step(s);
}

std::uint64_t steps() noexcept {
  return state().steps;
}

void set_step_listener(void (*listener)()) noexcept {
  state().step_listener = listener;
}

}  // namespace umem::runtime
