#include "torch_ext/guessed_steps.h"

#include <algorithm>

#include "runtime/steps.h"
#include "torch_ext/unlocked.h"

namespace umem::torch_ext {
namespace {

// Gradients are often added up over some passes before an optimizer's step.
constexpr std::uint64_t kPatience = 8;

void end_step() {
  const Unlocked without_gil;
  runtime::guess_step();
}

}  // namespace

void GuessedSteps::reset() {
  in_backward_ = unfinished_ = false;
  optimizers_ = steps_ = passes_ = most_ = 0;
  usual_ = 1;
}

void GuessedSteps::optimizer_stepped() {
  most_ = std::max(most_.load(), passes_.exchange(0));
  const std::uint64_t optimizers = ++optimizers_, usual = usual_;
  if (optimizers > 2 * usual + kPatience) usual_ = 1;  // no forward pass is seen any more
  unfinished_ = optimizers != usual && usual_ > 1;
  if (!unfinished_) end_step();
}

void GuessedSteps::began() {
  if (const std::uint64_t optimizers = optimizers_.exchange(0)) usual_ = optimizers;
  if (unfinished_.exchange(false)) end_step();
  passed();
}

void GuessedSteps::passed() {
  const std::uint64_t steps = runtime::steps();
  if (steps != steps_.exchange(steps)) passes_ = 0;
  const std::uint64_t patience = std::max(kPatience, 2 * most_.load());
  if (++passes_ <= patience) return;
  end_step();
  steps_ = runtime::steps();
}

}  // namespace umem::torch_ext
