#include "torch_ext/op_info.h"

#include <ATen/core/function_schema.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/kept_names.h"
#include "residency/op_family.h"

namespace umem::torch_ext {
namespace {

using residency::among;
using residency::family_of;
using residency::kAccumulate;
using residency::kEvaluate;
using residency::kOptimizerStep;

constexpr std::string_view kFactories[] = {
    "aten::empty",     "aten::empty_strided",     "aten::empty_like",
    "aten::new_empty", "aten::new_empty_strided", "aten::empty_permuted"};

// Ops that touch no contents: those that compare tensors, as `x.data = y` does, also for flat
// parameters; those that change shapes in place; views in lists; and one whose copy is an op of
// its own.
constexpr std::string_view kWithoutData[] = {"aten::_has_compatible_shallow_copy_type",
                                             "aten::is_same_size",
                                             "aten::is_set_to",
                                             "aten::is_pinned",
                                             "aten::result_type",
                                             "aten::atleast_1d",
                                             "aten::atleast_2d",
                                             "aten::atleast_3d",
                                             "aten::broadcast_tensors",
                                             "aten::meshgrid",
                                             "aten::as_strided_",
                                             "aten::detach_",
                                             "aten::squeeze_",
                                             "aten::swapaxes_",
                                             "aten::swapdims_",
                                             "aten::t_",
                                             "aten::transpose_",
                                             "aten::unsqueeze_",
                                             "aten::type_as"};

// Ops that read the shape of their input and not its contents.
constexpr std::string_view kShapeOnly[] = {
#include "torch_ext/shape_only.def"
};

// The autograd function around the forward pass of compiled code (torch/_functorch/_aot_autograd).
constexpr std::string_view kCompiledFunction = "CompiledFunction";

// Ops that write all of `self` and do not read it.
constexpr std::string_view kOverwriting[] = {
#include "torch_ext/overwrites.def"
};

// Collectives, whose schemas omit their writes (torch/csrc/distributed/c10d/Ops.cpp). The first
// argument of these receives: it is written whole, and not read.
constexpr std::string_view kReceiving[] = {
#include "torch_ext/receiving.def"
};
// These also read it, on some rank or all.
constexpr std::string_view kInPlace[] = {
#include "torch_ext/in_place.def"
};
// One rank has the data of these: weights, or a batch.
constexpr std::string_view kFromOneRank[] = {"c10d::broadcast_", "c10d::scatter_"};

// Every result is an alias that the op does not write: reshape, t, slice, detach, and also
// composites such as contiguous(), whose copy, if any, is a separate op.
bool is_view(const at::RecordFunction& fn) {
  const std::optional<c10::FunctionSchema> schema = fn.operator_schema();
  if (!schema || schema->returns().empty()) return false;
  return std::all_of(schema->returns().begin(), schema->returns().end(), [](const auto& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
}

// Not by its name alone: the forward pass of a program's own function may be called
// RegisterPostBackwardFunction, as FSDP2's is.
bool is_node(const at::RecordFunction& fn, std::string_view name) {
  return name.starts_with(kEvaluate) || fn.scope() == at::RecordScope::BACKWARD_FUNCTION;
}

// Ranges that a program marks in Python may end out of order or on another thread, which the op
// stack cannot follow.
bool is_range_of_program(const at::RecordFunction& fn) {
  return fn.scope() == at::RecordScope::USER_SCOPE &&
         !std::string_view(fn.name()).starts_with(kOptimizerStep);
}

// A range of a library: nodes and functions of autograd always carry inputs.
bool is_foreign_range(const at::RecordFunction& fn, std::string_view name) {
  if (name == "detach" || name == "detach_") return true;  // torch marks these twice
  return !fn.operator_name() && !name.starts_with(kEvaluate) && fn.inputs().empty();
}

OpKind kind_of(const at::RecordFunction& fn, std::string_view name) {
  if (name.starts_with(kOptimizerStep)) return OpKind::kOptimizer;
  if (is_foreign_range(fn, name)) return OpKind::kIgnored;
  if (name == kAccumulate) return OpKind::kAccumulateGrad;
  if (!fn.operator_name() && is_node(fn, name)) return OpKind::kBackward;
  if (!fn.operator_name() && name == kCompiledFunction) return OpKind::kCompiled;
  if (among(kFactories, name)) return OpKind::kFactory;
  if (among(kWithoutData, name)) return OpKind::kIgnored;
  return is_view(fn) ? OpKind::kIgnored : OpKind::kCompute;
}

// By the schema: `self(a!)` is written, and an out argument is overwritten.
std::vector<Use> uses_of(const at::RecordFunction& fn, std::string_view name) {
  const std::optional<c10::FunctionSchema> schema = fn.operator_schema();
  std::vector<Use> uses;
  if (among(kReceiving, name)) return {Use::kOverwrites};
  if (among(kInPlace, name)) return {Use::kChanges};
  if (!schema || !schema->is_mutable()) return uses;
  const bool fills = among(kOverwriting, name);
  for (const c10::Argument& argument : schema->arguments()) {
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    const bool whole = argument.kwarg_only() || fills;
    uses.push_back(!written ? Use::kReads : whole ? Use::kOverwrites : Use::kChanges);
  }
  return uses;
}

// Never destroyed: ops run during interpreter shutdown too.
struct SharedTable {
  std::shared_mutex mutex;
  std::unordered_map<std::string_view, std::unique_ptr<const OpInfo>> infos;
};
SharedTable& shared_table() {
  static auto* table = new SharedTable;
  return *table;
}

// Never destroyed, like the table.
const OpInfo& ignored() {
  auto* made = new OpInfo;
  made->kind = OpKind::kIgnored;
  return *made;
}

OpInfo describe(const at::RecordFunction& fn, std::string_view name) {
  const bool collective = name.starts_with("c10d::");
  std::vector<Use> uses = uses_of(fn, name);
  const bool shape_only = uses.empty() && among(kShapeOnly, name);
  return {std::string(name),
          {},
          "other",
          family_of(name),
          kind_of(fn, name),
          collective,
          collective && !among(kFromOneRank, name),
          shape_only,
          std::move(uses)};
}

}  // namespace

const OpInfo& OpInfoCache::find(const at::RecordFunction& fn) {
  static const OpInfo& range = ignored();
  if (is_range_of_program(fn))
    return range;  // its name is the program's own, and may be new each time
  const char* key = fn.name();
  const auto bits = reinterpret_cast<std::uintptr_t>(key);
  Entry& entry = entries_[((bits >> 4) ^ (bits >> 13)) % kEntries];
  // The compare is for names at an address that held another one before.
  if (entry.key == key && entry.info->name == key) return *entry.info;
  SharedTable& table = shared_table();
  const std::string_view name(key);
  // Overloads of one name differ in their writes. A name without overloads is looked up without a
  // copy.
  std::string full;
  if (const auto of = fn.operator_name(); of && !of->overload_name.empty())
    full = of->name + '.' + of->overload_name;
  const std::string_view wanted = full.empty() ? name : full;
  const OpInfo* info = nullptr;
  {
    std::shared_lock lock(table.mutex);
    if (auto it = table.infos.find(wanted); it != table.infos.end()) info = it->second.get();
  }
  if (!info) {
    auto made = std::make_unique<OpInfo>(describe(fn, name));
    std::unique_lock lock(table.mutex);
    if (table.infos.size() >= kMaxNames) {
      overflow_ = *made;
      return overflow_;
    }
    made->label = made->name.c_str();
    made->key = wanted;
    const std::string_view stored = made->key;
    info = table.infos.try_emplace(stored, std::move(made)).first->second.get();
  }
  entry = {key, info};
  return *info;
}

void lock_names_for_fork() {
  shared_table().mutex.lock();
}

void unlock_names_in_parent() {
  shared_table().mutex.unlock();
}

// A new lock: the old one counts waiting readers that do not exist in the child.
void unlock_names_in_child() {
  shared_table().mutex.unlock();
  std::construct_at(&shared_table().mutex);
}

}  // namespace umem::torch_ext
