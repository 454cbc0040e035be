// Roles of threads: some run a program's steps, and others only help, such as workers of
// collectives and loaders of batches. Helpers' work comes at another place of each step, and plans
// do not count it.
#pragma once
#include "base/export.h"

namespace umem {

// Marks this thread as one that runs steps: it ends steps, runs nodes of the backward pass, or ops
// whose results need a gradient.
UMEM_API void runs_steps() noexcept;
// True if other threads run steps, and this thread has run none so far.
UMEM_API bool helps_only() noexcept;

}  // namespace umem
