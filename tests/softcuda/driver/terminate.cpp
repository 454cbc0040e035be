// Prints the location from which std::terminate ends a program. Without an exception, such as for a
// thread that Python stops inside of native code, there is no other hint.
#include <execinfo.h>
#include <unistd.h>

#include <array>
#include <exception>

namespace softcuda {
namespace {

std::terminate_handler g_previous = nullptr;

[[noreturn]] void say_where() {
  std::array<void*, 64> frames;
  backtrace_symbols_fd(frames.data(), backtrace(frames.data(), static_cast<int>(frames.size())),
                       STDERR_FILENO);
  g_previous();
  _exit(134);  // no handler returns
}

[[maybe_unused]] const bool g_installed = [] {
  g_previous = std::set_terminate(&say_where);
  return true;
}();

}  // namespace
}  // namespace softcuda
