// The ends of a training program's steps without `umem.step()`: the last step of an optimizer
// before the next forward pass; without one, the forward pass after a backward pass.
#pragma once
#include <atomic>
#include <cstdint>

namespace umem::torch_ext {

class GuessedSteps {
 public:
  // Forgets everything seen so far.
  void reset();
  // An optimizer's step ends. The program's does too if as many optimizers have stepped since the
  // last forward pass as did the time before. Until that is known to be several, each ends one.
  void optimizer_stepped();
  // A node of the backward pass begins, inside no other op.
  void backward() { in_backward_.store(true, std::memory_order_relaxed); }
  // An op begins whose results need a gradient, inside no other op. After a backward pass a step
  // ends before it: one with fewer optimizers than usual, or, without any, one after as many
  // unmarked passes as are needed for certainty.
  void forward() {
    if (in_backward_.load(std::memory_order_relaxed) && in_backward_.exchange(false)) began();
  }

 private:
  void began();
  void passed();

  std::atomic<bool> in_backward_{false};
  // A rare race of threads costs a step's mark.
  std::atomic<std::uint64_t> optimizers_{0};  // that stepped since the last forward pass
  std::atomic<std::uint64_t> usual_{1};       // of them from one forward pass to the next
  std::atomic<bool> unfinished_{false};       // some stepped, and no step ended then
  std::atomic<std::uint64_t> steps_{0};       // when the last pass ended
  std::atomic<std::uint64_t> passes_{0};      // since something else marked a step
  std::atomic<std::uint64_t> most_{0};        // passes in a step of an optimizer
};

}  // namespace umem::torch_ext
