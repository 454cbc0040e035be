// The recorder's state of an open op. Plain data on the caller's stack.
#pragma once
#include <chrono>
#include <cstdint>

namespace umem::trace {

struct OpenOp;

inline std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

// Times of one op on the host, by the thread that runs it: `self_ns` is without umem's own work and
// without the ops inside, which have theirs.
struct OpTimer {
  std::uint64_t entered_ns = 0;  // into umem's notice of its begin; 0: it is not recorded
  std::uint64_t began_ns = 0;
  std::uint64_t nested_ns = 0;  // inner ops
  std::uint64_t self_ns = 0;
  OpenOp* open = nullptr;  // the recorder's part, once the op touched memory of umem's

  void enter() { entered_ns = now_ns(); }
  void begin() { began_ns = now_ns(); }
  // An inner op is over, including umem's work for it.
  void leave(const OpTimer& inner) {
    if (entered_ns != 0) nested_ns += now_ns() - inner.entered_ns;
  }
  void end() {
    const std::uint64_t own = now_ns() - began_ns;
    self_ns = own > nested_ns ? own - nested_ns : 0;
  }
};

// umem's own work inside an op, which does not count in the op's time.
class Pause {
 public:
  explicit Pause(OpTimer* span) : span_(span && span->entered_ns != 0 ? span : nullptr) {
    if (span_) began_ns_ = now_ns();
  }
  ~Pause() {
    if (span_) span_->nested_ns += now_ns() - began_ns_;
  }
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

 private:
  OpTimer* span_;
  std::uint64_t began_ns_ = 0;
};

}  // namespace umem::trace
