// The workspaces that cuBLAS takes from torch's allocator.
#pragma once

namespace umem::torch_ext {

// Tells the runtime their sizes. CUDA must have been initialised.
void tell_workspace_sizes();

}  // namespace umem::torch_ext
