// An error as plain data, for callers that another compiler may have built.
#pragma once
#include "base/status.h"

namespace umem::runtime {

struct Failure {
  int code = 0;  // umem::Code
  const char* message = "";
};
// Describes the status in `error`, if that is not null. The message stays valid until the next
// failure on this thread.
void fail(Failure* error, const Status& status);

}  // namespace umem::runtime
