// The log of transfers, for profilers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/export.h"
#include "base/status.h"

namespace umem::runtime {

// Logs the time of each transfer on all devices between the two calls. Unfinished transfers are not
// included, nor more than LaneLog::kMost per lane; `left_out` counts the latter. Empty if umem is
// off.
struct LoggedTransfer {
  int device = 0;
  const char* what = "";
  std::size_t bytes = 0;
  std::int64_t begin_ns = 0, end_ns = 0;  // since 1970
};
UMEM_API Status start_transfer_log();
UMEM_API std::vector<LoggedTransfer> take_transfer_log(std::size_t* left_out);

}  // namespace umem::runtime
