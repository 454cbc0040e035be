// The system calls of a disk, which a test replaces to let them fail.
#pragma once
#include <sys/types.h>

#include <cerrno>
#include <cstddef>

#include "base/export.h"
#include "base/units.h"

namespace umem::soft {

inline constexpr std::size_t kBlockBytes = 4096;  // O_DIRECT's alignment, on all disks in use

struct DiskCalls {
  ssize_t (*write)(int file, const void* from, std::size_t bytes, off_t at) = nullptr;
  ssize_t (*read)(int file, void* to, std::size_t bytes, off_t at) = nullptr;
  int (*reserve)(int file, off_t at, off_t bytes) = nullptr;  // an error number; 0: done
};
UMEM_API void set_disk_calls(const DiskCalls& calls);  // null: the system's
const DiskCalls& disk_calls();

// `bytes`, in as many calls as the system makes of it; at the file's end `least` are enough. An
// error number, or 0.
template <class Call>
int transfer(char* at, std::size_t bytes, std::size_t least, off_t offset, Call call) {
  for (std::size_t done = 0; done < least;) {
    const ssize_t n = call(at + done, bytes - done, offset + static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    const std::size_t reached = done + static_cast<std::size_t>(n);
    if (reached >= least) return 0;
    if (align_down(reached, kBlockBytes) == done) return EIO;  // the end of the file
    done = align_down(reached, kBlockBytes);
  }
  return 0;
}

}  // namespace umem::soft
