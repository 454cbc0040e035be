#include "soft/descriptors.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace umem::soft {

int moved_up(int file) {
  constexpr rlim_t kHigh = 512;  // the kernel's table has room for all numbers below
  rlimit most = {};
  if (file < 0 || getrlimit(RLIMIT_NOFILE, &most) != 0) return file;
  const int error = errno;
  const int from = static_cast<int>(std::min(most.rlim_cur / 2, kHigh));
  const int moved = fcntl(file, F_DUPFD_CLOEXEC, from);
  errno = error;
  if (moved < 0) return file;
  close(file);
  return moved;
}

}  // namespace umem::soft
