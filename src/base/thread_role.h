// Which threads a program's steps run on, and which only help: workers of collectives, loaders of
// batches. What helpers do comes at another place of each step, and no plan counts it.
#pragma once
#include "base/export.h"

namespace umem {

// From now on this thread is one on which steps run: it ends steps, runs nodes of the backward
// pass, or ops whose results need a gradient.
UMEM_API void runs_steps() noexcept;
// Whether other threads run steps, and this one has run none so far.
UMEM_API bool helps_only() noexcept;

}  // namespace umem
