// Allocation for a framework: called by torch_ext, the C functions and the bindings at operator
// speed. Only plain data crosses here, as in ops.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/export.h"
#include "residency/tags.h"
#include "runtime/failure.h"

namespace umem::runtime {

// Memory for the framework. Null on failure, with `error` (when not null) set to a message that
// stays valid until the next failure on this thread. `bytes` may be 0: returns null, no error.
UMEM_API void* allocate(std::size_t bytes, int device, std::uintptr_t stream,
                        Failure* error) noexcept;
// True if `ptr` was a live block of umem's, which is then freed.
UMEM_API bool release(void* ptr) noexcept;
// The block is in use on `stream` too: once released it is reused after the work there is done.
UMEM_API bool record_stream(const void* ptr, std::uintptr_t stream) noexcept;
UMEM_API bool owns(const void* ptr) noexcept;
// Sets the block's tag; false if umem does not own the block.
UMEM_API bool tag(const void* ptr, residency::Tag tag) noexcept;
// Sets the tag and the family of the op that made the block.
UMEM_API bool label(const void* ptr, residency::Tag tag, residency::Family family) noexcept;

}  // namespace umem::runtime
