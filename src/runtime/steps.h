// The ends of a program's steps.
#pragma once
#include <cstdint>

#include "base/export.h"

namespace umem::runtime {

// One step of the program ended: the program says so. From then on, until a start, its steps end
// there only.
UMEM_API void step() noexcept;
// One step of the program seems to have ended.
UMEM_API void guess_step() noexcept;
// The number of steps since the start.
UMEM_API std::uint64_t steps() noexcept;
// The listener is called after each step, on the thread that ends it and without any lock. Null: no
// listener.
UMEM_API void set_step_listener(void (*listener)()) noexcept;

}  // namespace umem::runtime
