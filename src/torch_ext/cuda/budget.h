// The budget from inside torch.
#pragma once
#include <cstddef>

namespace umem::torch_ext {

// That of the device; 0 where it is found out at the device's first use, which has not come.
std::size_t budget(int device);
// Sets umem's budget; what the host may hold stays. Throws ValueError where umem refuses it.
void set_budget(std::size_t bytes);

}  // namespace umem::torch_ext
