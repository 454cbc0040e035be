#include "torch_ext/cuda/workspace_sizes.h"

#include <dlfcn.h>

#include <array>

#include "runtime/accounts.h"

namespace umem::torch_ext {

// By name: their header needs those of cuBLAS, which few environments have. The functions ask for
// the device's properties, which starts CUDA: a process that has started it cannot fork.
void tell_workspace_sizes() {
  void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!torch) return;  // another build: its workspaces may be evicted, and faulted back
  std::array<std::size_t, 2> sizes{};
  std::size_t count = 0;
  for (const char* name :
       {"_ZN2at4cuda22getChosenWorkspaceSizeEv", "_ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv"})
    if (auto* size = reinterpret_cast<std::size_t (*)()>(dlsym(torch, name)))
      sizes[count++] = size();
  dlclose(torch);
  runtime::set_workspace_sizes(sizes.data(), count);
}

}  // namespace umem::torch_ext
