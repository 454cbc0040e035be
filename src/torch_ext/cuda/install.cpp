#include "torch_ext/cuda/install.h"

#include <c10/cuda/CUDAAllocatorConfig.h>

#include <mutex>

#include "runtime/accounts.h"
#include "torch_ext/cuda/cuda_allocator.h"
#include "torch_ext/cuda/workspace_sizes.h"
#include "torch_ext/unlocked.h"

namespace umem::torch_ext {
namespace {

std::mutex g_cuda_mutex;
bool g_was_installed = false;

// torch keeps the allocator twice: for CUDA, and by device type for torch.accelerator. There it
// takes one of at least the priority of the present one, which is 0 for torch 2.11's own and 1 for
// 2.15's.
void set_allocator(caching::CUDAAllocator* allocator) {
  caching::allocator.store(allocator);
  c10::SetAllocator(c10::kCUDA, allocator, 1);
}

void check_replaceable(caching::CUDAAllocator& present) {
  TORCH_CHECK(g_was_installed || !present.initialized(),
              "CUDA is already initialised, with torch's own allocator: call umem.enable() before "
              "the first CUDA call of the program, or use UMEM_ALLOCATOR=pool");
  const std::string name = present.name();
  TORCH_CHECK(name == "native" || name == "cudaMallocAsync", "torch's CUDA allocator is '", name,
              "' already; umem takes the place of torch's own allocators only. Do not install the "
              "other one, or use UMEM_ALLOCATOR=pool");
  TORCH_CHECK(
      c10::GetAllocator(c10::kCUDA) == &present,
      "another allocator was set for CUDA in addition to torch's own; umem must be enabled without "
      "it, or use UMEM_ALLOCATOR=pool");
}

bool is_installed() {
  return caching::get() == &CudaAllocator::instance();
}

// Returns true if it was not installed.
bool install() {
  std::lock_guard guard(g_cuda_mutex);
  if (is_installed()) return false;
  caching::CUDAAllocator* present = caching::get();
  check_replaceable(*present);
  CudaAllocator& ours = CudaAllocator::instance();
  if (ours.native() != present) ours.set_native(present);
  set_allocator(&ours);
  if (c10::GetAllocator(c10::kCUDA) != &ours) {
    caching::allocator.store(present);
    TORCH_CHECK(false,
                "torch kept another allocator for CUDA, which was set with a higher priority; umem "
                "must be enabled without it");
  }
  g_was_installed = true;
  return true;
}

}  // namespace

void install_cuda_allocator() {
  CudaAllocator& ours = CudaAllocator::instance();
  if (g_was_installed && ours.initialized() && !runtime::any_captures()) {
    // The cache of torch's own allocator is of no more use, and would count towards the budget.
    const Unlocked without_gil;
    ours.native()->emptyCache({0, 0});
  }
  if (install() && ours.initialized()) tell_workspace_sizes();  // else `init` does
  ours.tell_outside_bytes();                                    // without Python's lock for a while
  runtime::set_memory_fraction(caching::CUDAAllocatorConfig::per_process_memory_fraction());
}

void remove_cuda_allocator() {
  std::lock_guard guard(g_cuda_mutex);
  // It has to see the end of a capture. With umem off, torch's own allocator serves through it.
  if (runtime::any_captures()) return;
  if (is_installed()) set_allocator(CudaAllocator::instance().native());
}

}  // namespace umem::torch_ext
