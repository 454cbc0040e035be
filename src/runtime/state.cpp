#include "runtime/state.h"

#include <string>

namespace umem::runtime {

constinit State* g_state = nullptr;

State& make_state() {
  static State* all = [] {
    auto* made = new State;
    __atomic_store_n(&g_state, made, __ATOMIC_RELEASE);
    return made;
  }();
  return *all;
}

Status not_running(const State& s) {
  return {Code::kOff, s.forked
                          ? "the process was forked after it had used a GPU; start workers by spawn"
                          : "umem is not running; call umem.enable() first"};
}

Status no_such_device(int ordinal) {
  return {Code::kInvalidArgument, "umem serves devices 0 to " + std::to_string(kMaxDevices - 1) +
                                      ", and not " + std::to_string(ordinal)};
}

}  // namespace umem::runtime
