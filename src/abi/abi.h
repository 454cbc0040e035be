// The C functions of libumem.so for torch.cuda.memory.CUDAPluggableAllocator, with torch's exact
// signatures. A stream is a cudaStream_t. Failures are C++ exceptions, because torch does not check
// for null: callers from C must use runtime/alloc.h.
#pragma once
#include <sys/types.h>

#include <cstddef>

#include "base/export.h"

extern "C" {

// Never null but for 0 bytes. While umem is off it is plain device memory.
UMEM_API void* umem_alloc(ssize_t bytes, int device, void* stream);
UMEM_API void umem_free(void* ptr, ssize_t bytes, int device, void* stream);

UMEM_API void umem_record_stream(void* ptr, void* stream);
// The range that contains `ptr`, and its size; `ptr` itself if it is not umem's.
UMEM_API void* umem_base_alloc(void* ptr, std::size_t* bytes);
UMEM_API void umem_release_cached();
// A fraction of the device's memory becomes umem's budget.
UMEM_API void umem_set_memory_fraction(double fraction, int device);
}
