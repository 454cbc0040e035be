// umem as torch's CUDA allocator.
#pragma once
namespace umem::torch_ext {

// Both may be called twice; the second call does nothing. Tensors of either allocator remain valid.
// Installing throws once torch uses its own allocator, unless umem was installed in this process
// before.
void install_cuda_allocator();
void remove_cuda_allocator();

}  // namespace umem::torch_ext
