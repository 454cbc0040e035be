// Storages whose contents have not arrived yet, such as parameters that the host updates.
//
// Only operators read them meanwhile: the code that announces operators asks here first.
#pragma once
#include <cstddef>
#include <vector>

#include "base/export.h"
#include "runtime/op.h"

namespace umem::runtime {

// Called before an op that uses some of the storages, on its thread and without any lock of the
// runtime's: the contents are there when it returns. It may run ops of its own.
using Arrive = void (*)(const void* storage);
// Replaces the set of awaited storages.
UMEM_API void set_awaited(std::vector<const void*> storages, Arrive arrive);
// The storages that are awaited now.
UMEM_API std::vector<const void*> awaited_storages();
// True if any storage is awaited. If none is, this is all that an op pays.
UMEM_API bool awaiting() noexcept;
// Waits for the awaited storages among an op's inputs.
UMEM_API void await_contents(const Input* inputs, std::size_t count);

}  // namespace umem::runtime
