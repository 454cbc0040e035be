// Steps of training programs that no optimizer of torch and no `umem.step()` ends, such as those
// that update parameters by hand.
#pragma once
#include <atomic>
#include <cstdint>

namespace umem::torch_ext {

class BackwardSteps {
 public:
  // No program has run yet.
  void reset();
  // An optimizer's step ends: this is such a program's step.
  void optimizer_stepped();
  // A node of the backward pass begins that is in no other op.
  void backward() { in_backward_.store(true, std::memory_order_relaxed); }
  // An op begins whose results need a gradient, in no other op. After a backward pass a step ends
  // before it, if as many passes as it takes to be sure were in no step that something else marked.
  void forward() {
    if (in_backward_.load(std::memory_order_relaxed) && in_backward_.exchange(false)) passed();
  }

 private:
  void passed();

  std::atomic<bool> in_backward_{false};
  // Only the thread that `passed` changes them, and a rare race costs a step's mark.
  std::atomic<std::uint64_t> steps_{0};   // when the last pass ended
  std::atomic<std::uint64_t> passes_{0};  // since something else marked a step
  std::atomic<std::uint64_t> most_{0};    // passes in a step of an optimizer
};

}  // namespace umem::torch_ext
