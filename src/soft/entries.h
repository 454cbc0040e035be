#pragma once
#include "driver/table.h"

namespace umem::soft {

// The driver entry points of the open software device. Missing ones are null.
void fill_entries(driver::Table& table);
void fill_memory_entries(driver::Table& table);  // part of fill_entries

}  // namespace umem::soft
