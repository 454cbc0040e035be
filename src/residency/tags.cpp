#include "residency/tags.h"

#include <cstddef>

namespace umem::residency {
namespace {

constexpr const char* kTags[] = {"param",     "grad", "optimizer", "activation", "input",
                                 "workspace", "temp", "comm",      "kv_cache",   "pool"};
constexpr const char* kFamilies[] = {"none",        "conv",    "linear",    "norm", "attention",
                                     "elementwise", "pooling", "embedding", "loss", "other"};
static_assert(sizeof kTags / sizeof *kTags == static_cast<std::size_t>(Tag::kCount));
static_assert(sizeof kFamilies / sizeof *kFamilies == static_cast<std::size_t>(Family::kCount));

}  // namespace

const char* name(Tag tag) {
  return kTags[static_cast<std::size_t>(tag)];
}
const char* name(Family family) {
  return kFamilies[static_cast<std::size_t>(family)];
}

Tag find_tag(std::string_view wanted) {
  std::size_t i = 0;
  while (i < static_cast<std::size_t>(Tag::kCount) && wanted != kTags[i]) ++i;
  return static_cast<Tag>(i);
}

Family find_family(std::string_view wanted) {
  std::size_t i = 0;
  while (i < static_cast<std::size_t>(Family::kCount) && wanted != kFamilies[i]) ++i;
  return static_cast<Family>(i);
}

}  // namespace umem::residency
