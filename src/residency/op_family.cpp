#include "residency/op_family.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <string>

namespace umem::residency {
namespace {

struct Rule {
  std::string_view part;  // lower case
  Family family;
};

// The first match in the name decides, so special names come first: attention ops contain "embed"
// or "linear", upsampling is "bilinear", and batch_norm's backward contains
// "native_batch_norm_backward".
constexpr Rule kRules[] = {
    {"upsample", Family::kOther},      {"rnn", Family::kLinear},
    {"attention", Family::kAttention}, {"multi_head", Family::kAttention},
    {"conv", Family::kConv},           {"embedding", Family::kEmbedding},
    {"loss", Family::kLoss},           {"cross_entropy", Family::kLoss},
    {"kl_div", Family::kLoss},         {"pool", Family::kPooling},
    {"batch_norm", Family::kNorm},     {"layer_norm", Family::kNorm},
    {"group_norm", Family::kNorm},     {"instance_norm", Family::kNorm},
    {"rms_norm", Family::kNorm},       {"batchnorm", Family::kNorm},
    {"layernorm", Family::kNorm},      {"groupnorm", Family::kNorm},
    {"rmsnorm", Family::kNorm},        {"linear", Family::kLinear},
    {"matmul", Family::kLinear},       {"einsum", Family::kLinear},
    {"lstm", Family::kLinear},         {"gru_cell", Family::kLinear},
    {"grouped_mm", Family::kLinear},
};

constexpr std::string_view kLinear[] = {"mm",  "addmm", "bmm",  "baddbmm", "addbmm",
                                        "mv",  "addmv", "dot",  "vdot",    "addr",
                                        "ger", "outer", "inner"};

constexpr std::string_view kElementwise[] = {"add",
                                             "sub",
                                             "rsub",
                                             "mul",
                                             "div",
                                             "neg",
                                             "abs",
                                             "exp",
                                             "log",
                                             "log1p",
                                             "sqrt",
                                             "rsqrt",
                                             "pow",
                                             "square",
                                             "relu",
                                             "gelu",
                                             "silu",
                                             "mish",
                                             "elu",
                                             "selu",
                                             "leaky_relu",
                                             "sigmoid",
                                             "tanh",
                                             "softplus",
                                             "hardtanh",
                                             "hardswish",
                                             "hardsigmoid",
                                             "relu6",
                                             "threshold",
                                             "clamp",
                                             "clamp_min",
                                             "maximum",
                                             "minimum",
                                             "where",
                                             "dropout",
                                             "softmax",
                                             "_softmax",
                                             "addcmul",
                                             "addcdiv",
                                             "lerp",
                                             "sin",
                                             "cos",
                                             "erf",
                                             "copy",
                                             "clone",
                                             "_to_copy",
                                             "fill",
                                             "zero",
                                             "bernoulli",
                                             "eq",
                                             "ne",
                                             "lt",
                                             "le",
                                             "gt",
                                             "ge",
                                             "reciprocal",
                                             "log_softmax",
                                             "_log_softmax",
                                             "native_dropout",
                                             "masked_fill",
                                             "logical_not"};

// Reduces "aten::_foreach_add_" to "add" and "AddmmBackward0" to "addmm": the form of the lists
// above.
std::string bare_name(std::string_view name) {
  if (name.starts_with(kEvaluate)) name.remove_prefix(kEvaluate.size());
  if (const std::size_t at = name.rfind("::"); at != name.npos) name.remove_prefix(at + 2);
  if (const std::size_t at = name.find("Backward"); at != name.npos && at > 0)
    name = name.substr(0, at);
  if (name.starts_with("_foreach_")) name.remove_prefix(9);
  std::string bare(name);
  std::transform(bare.begin(), bare.end(), bare.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (bare.ends_with("_backward")) bare.resize(bare.size() - 9);
  if (bare.size() > 1 && bare.back() == '_') bare.pop_back();
  return bare;
}

}  // namespace

Family family_of(std::string_view name) {
  const std::string bare = bare_name(name);
  if (bare.empty() || name == kAccumulate || name.starts_with(kOptimizerStep)) return Family::kNone;
  for (const Rule& rule : kRules)
    if (bare.find(rule.part) != bare.npos) return rule.family;
  if (among(kLinear, bare)) return Family::kLinear;
  return among(kElementwise, bare) ? Family::kElementwise : Family::kOther;
}

}  // namespace umem::residency
