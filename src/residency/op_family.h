// The family of an operator, derived from its name alone.
#pragma once
#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string_view>

#include "base/export.h"
#include "residency/tags.h"

namespace umem::residency {

// Torch's names of scopes around ops: the engine's node, a leaf's gradient, an optimizer's step.
constexpr std::string_view kEvaluate = "autograd::engine::evaluate_function: ";
constexpr std::string_view kAccumulate = "torch::autograd::AccumulateGrad";
constexpr std::string_view kOptimizerStep = "Optimizer.step#";

template <std::size_t N>
bool among(const std::string_view (&names)[N], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

// Names are "aten::addmm", "AddmmBackward0" or "aten::_foreach_add_", for example.
UMEM_API Family family_of(std::string_view name);

}  // namespace umem::residency
