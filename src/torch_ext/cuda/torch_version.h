// The allocator interface of torch grows with every release.
#pragma once
#include <torch/headeronly/version.h>

#define UMEM_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||       \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
