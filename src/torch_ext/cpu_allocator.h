// umem as torch's CPU allocator: the software device's way into torch.
#pragma once
#include <cstddef>

namespace umem::torch_ext {

// Both may be called twice; the second call does nothing. Tensors of either allocator stay valid.
void install_allocator();
void remove_allocator();
bool allocator_installed();

// Whether this thread allocates by torch's own allocator from now on; what held before. For memory
// that stands for the host's.
bool allocate_outside(bool outside);

// Mean ns of one allocation and its free through torch's present CPU allocator.
double bench_cpu_alloc(std::size_t nbytes, std::size_t iterations);

}  // namespace umem::torch_ext
