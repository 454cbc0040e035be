// The system calls of a disk, which a test replaces to let them fail.
#pragma once
#include <sys/types.h>

#include <cerrno>
#include <cstddef>

#include "base/export.h"

namespace umem::soft {

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
    if (n == 0) return EIO;  // the end of the file
    done += static_cast<std::size_t>(n);
  }
  return 0;
}

}  // namespace umem::soft
