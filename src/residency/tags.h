// The purpose of a block, and the kind of op that made it.
#pragma once
#include <string_view>

#include "base/export.h"

namespace umem::residency {

enum class Tag : unsigned char {
  kParam,
  kGrad,
  kOptimizer,
  kActivation,
  kInput,
  kWorkspace,
  kTemp,
  kComm,
  kKvCache,  // set by programs only: keys and values of past tokens
  kPool,     // a segment of small blocks
  kCount
};
enum class Family : unsigned char {
  kNone,
  kConv,
  kLinear,
  kNorm,
  kAttention,
  kElementwise,
  kPooling,
  kEmbedding,
  kLoss,
  kOther,
  kCount
};

UMEM_API const char* name(Tag tag);
UMEM_API const char* name(Family family);
// kCount when unknown.
UMEM_API Tag find_tag(std::string_view name);
UMEM_API Family find_family(std::string_view name);

}  // namespace umem::residency
