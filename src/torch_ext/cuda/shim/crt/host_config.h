// Replaces CUDA's crt/host_config.h, like host_defines.h next to it. The real file refuses
// compilers that nvcc does not know; nvcc compiles nothing here.
#pragma once
