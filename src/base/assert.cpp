#include "base/assert.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace umem {
namespace {

void put(const char* text) {
  std::size_t left = std::strlen(text);
  while (left > 0) {
    const ssize_t done = write(STDERR_FILENO, text, left);
    if (done <= 0) return;
    text += done;
    left -= static_cast<std::size_t>(done);
  }
}

}  // namespace

// Neither stdio nor malloc: the signal may have interrupted either.
void assert_failed(const char* file, unsigned line, const char* expression,
                   const char* message) noexcept {
  char digits[12];
  char* at = digits + sizeof digits;
  *--at = '\0';
  do *--at = static_cast<char>('0' + line % 10);
  while ((line /= 10) > 0);
  for (const char* part :
       {"umem: ", file, ":", static_cast<const char*>(at), ": ", message, " (", expression, ")\n"})
    put(part);
  std::abort();
}

}  // namespace umem
