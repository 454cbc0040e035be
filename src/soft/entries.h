#pragma once
#include "driver/table.h"

namespace umem::soft {

// The driver entry points of the open software device. Missing ones are null.
void fill_entries(driver::Table& table);

}  // namespace umem::soft
