// The flat statistics record.
#pragma once
#include <cstdint>

namespace umem::runtime {

// docs/options.md and umem.Stats describe each field.
struct Stats {
#define UMEM_STAT(name, doc) std::uint64_t name = 0;
#include "runtime/stats.def"
#undef UMEM_STAT
};

}  // namespace umem::runtime
