// Stands in for CUDA's crt/host_config.h, as host_defines.h beside it does for its own. The real
// file refuses compilers that nvcc does not know; nothing is compiled by nvcc here.
#pragma once
