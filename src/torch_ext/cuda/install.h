// umem as torch's CUDA allocator.
#pragma once
#include <cstddef>

namespace umem::torch_ext {

// Both may be called twice; the second call does nothing. Tensors of either allocator remain valid.
// Installing throws once torch uses its own allocator, unless umem was installed in this process
// before.
void install_cuda_allocator();
void remove_cuda_allocator();
bool cuda_allocator_installed();

// Mean ns of one allocation and its free through torch's present CUDA allocator. CUDA must have
// been initialised.
double bench_cuda_alloc(std::size_t nbytes, std::size_t iterations);

}  // namespace umem::torch_ext
