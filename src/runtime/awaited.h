// Storages whose contents are still on their way, such as parameters that the host updates.
//
// Nothing but an operator reads them meanwhile: whoever announces operators asks here first.
#pragma once
#include <cstddef>
#include <vector>

#include "base/export.h"
#include "runtime/op.h"

namespace umem::runtime {

// Called before an op that uses some of the storages, on its thread and without any lock of the
// runtime's: the contents are there when it returns. It may run ops of its own.
using Arrive = void (*)(const void* storage);
// Replaces all that were awaited.
UMEM_API void set_awaited(std::vector<const void*> storages, Arrive arrive);
// The storages that are awaited now.
UMEM_API std::vector<const void*> awaited_storages();
// Whether any is: what an op costs where none is.
UMEM_API bool awaiting() noexcept;
// Of what an op uses.
UMEM_API void await_contents(const Input* inputs, std::size_t count);

}  // namespace umem::runtime
