// The ends of a program's steps.
#pragma once
#include <cstdint>

#include "base/export.h"

namespace umem::runtime {

// The program reports the end of a step. From then on, until the next start, only it ends steps.
UMEM_API void step() noexcept;
// Reports a guessed end of a step, which is ignored once the program has reported one.
UMEM_API void guess_step() noexcept;
// The number of steps since the start.
UMEM_API std::uint64_t steps() noexcept;
// The listener is called after each step, on the thread that ends it and without a lock. Null: no
// listener.
UMEM_API void set_step_listener(void (*listener)()) noexcept;

}  // namespace umem::runtime
