#pragma once
#include "driver/table.h"

namespace umem::soft {

// The memory entry points of the open software device.
void fill_memory_entries(driver::Table& table);

}  // namespace umem::soft
