// Replaces CUDA's crt/host_defines.h where only the runtime's headers are installed (torch's wheels
// lack that file). It is last on the include path: the real one wins. It only defines CUDA's
// keywords for the host's compiler.
#pragma once

#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __forceinline__ __inline__ __attribute__((always_inline))
#define CUDARTAPI
#define CUDARTAPI_CDECL
