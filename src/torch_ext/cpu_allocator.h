// umem as torch's CPU allocator: the software device's way into torch.
#pragma once
#include <cstddef>

namespace umem::torch_ext {

// Both may be called twice; the second call does nothing. Tensors of either allocator remain valid.
void install_allocator();
void remove_allocator();
bool allocator_installed();

// Sets whether this thread uses torch's own allocator, for memory that represents the host's;
// returns the previous setting.
bool allocate_outside(bool outside);

// Mean ns of one allocation and its free through torch's present CPU allocator.
double bench_cpu_alloc(std::size_t nbytes, std::size_t iterations);

}  // namespace umem::torch_ext
