// In a file of its own: umem's names of the driver's constants and CUDA's headers do not mix.
#include "torch_ext/cuda/budget.h"

#include <c10/util/Exception.h>

#include "runtime/accounts.h"
#include "runtime/runtime.h"

namespace umem::torch_ext {

std::size_t budget(int device) {
  const std::size_t now = runtime::budget(device);
  return now > 0 ? now : runtime::current_options().budget_bytes;
}

void set_budget(std::size_t bytes) {
  const Status done = runtime::set_budget(bytes, runtime::current_options().host_budget_bytes);
  TORCH_CHECK_VALUE(done.ok(), done.message());
}

}  // namespace umem::torch_ext
