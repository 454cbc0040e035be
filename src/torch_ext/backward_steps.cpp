#include "torch_ext/backward_steps.h"

#include <algorithm>

#include "runtime/ops.h"
#include "torch_ext/unlocked.h"

namespace umem::torch_ext {
namespace {

// Gradients are often added up over some passes before an optimizer's step.
constexpr std::uint64_t kPatience = 8;

}  // namespace

void BackwardSteps::reset() {
  in_backward_ = false;
  steps_ = passes_ = most_ = 0;
}

void BackwardSteps::optimizer_stepped() {
  most_ = std::max(most_.load(), passes_.exchange(0));
}

void BackwardSteps::passed() {
  const std::uint64_t steps = runtime::steps();
  if (steps != steps_.exchange(steps)) passes_ = 0;
  const std::uint64_t patience = std::max(kPatience, 2 * most_.load());
  if (++passes_ <= patience) return;
  const Unlocked without_gil;
  runtime::step();
  steps_ = runtime::steps();
}

}  // namespace umem::torch_ext
