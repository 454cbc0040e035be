// Fault injection: the n-th call of an entry point fails.
#pragma once
#include <cstdint>

#include "driver/table.h"

namespace umem::driver {

// Wraps the entry points that the driver has, so that their calls are counted and can fail.
void instrument(Table& table);
// Makes the n-th call (1 = next) of one entry point return `error` without reaching the driver; a
// `torn` one of a batch reaches it with the first half of its ranges.
void inject(Entry entry, std::uint64_t nth_call, CUresult error, bool torn);
void clear_injections();
std::uint64_t calls(Entry entry);  // since `instrument`

}  // namespace umem::driver
