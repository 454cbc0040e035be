// Threads of umem's own. The system may refuse one (a limit of tasks), which is an error like any
// other: std::thread throws, and callers may be noexcept.
#pragma once
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/status.h"

namespace umem {

template <class Work>
Status start_thread(std::thread& thread, const char* purpose, Work work) {
  try {
    thread = std::thread(std::move(work));
  } catch (const std::system_error& error) {
    return {Code::kBadState, std::string("the system refused a thread that ") + purpose + " (" +
                                 error.what() +
                                 "); raise the limit of tasks (ulimit -u, pids.max), or run fewer"};
  }
  return {};
}

}  // namespace umem
