#include "runtime/failure.h"

#include <string>

namespace umem::runtime {

void fail(Failure* error, const Status& status) {
  thread_local std::string message;  // of the last failure on this thread
  if (!error) return;
  message = status.message();
  *error = {static_cast<int>(status.code()), message.c_str()};
}

}  // namespace umem::runtime
