// The log of transfers, for profilers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/export.h"
#include "base/status.h"

namespace umem::runtime {

// When each transfer was under way, of all devices, from the first call to the second: what is not
// done by then is not told, and no more than LaneLog::kMost of a lane, but for how many are
// `left_out`. Where umem is off there are none.
struct LoggedTransfer {
  int device = 0;
  const char* what = "";
  std::size_t bytes = 0;
  std::int64_t begin_ns = 0, end_ns = 0;  // since 1970
};
UMEM_API Status start_transfer_log();
UMEM_API std::vector<LoggedTransfer> take_transfer_log(std::size_t* left_out);

}  // namespace umem::runtime
