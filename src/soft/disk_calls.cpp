#include "soft/disk_calls.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace umem::soft {
namespace {

// By number: libc's functions are interposed, for accesses to managed memory.
ssize_t system_write(int file, const void* from, std::size_t bytes, off_t at) {
  return syscall(SYS_pwrite64, file, from, bytes, at);
}
ssize_t system_read(int file, void* to, std::size_t bytes, off_t at) {
  return syscall(SYS_pread64, file, to, bytes, at);
}
int system_reserve(int file, off_t at, off_t bytes) {
  if (fallocate(file, 0, at, bytes) == 0) return 0;
  // Some file systems reserve nothing. There the first write takes the blocks.
  if (errno != EOPNOTSUPP) return errno;
  return ftruncate(file, at + bytes) == 0 ? 0 : errno;
}

constexpr DiskCalls kSystem{system_write, system_read, system_reserve};
DiskCalls g_calls = kSystem;

}  // namespace

void set_disk_calls(const DiskCalls& calls) {
  g_calls.write = calls.write ? calls.write : kSystem.write;
  g_calls.read = calls.read ? calls.read : kSystem.read;
  g_calls.reserve = calls.reserve ? calls.reserve : kSystem.reserve;
}

const DiskCalls& disk_calls() {
  return g_calls;
}

}  // namespace umem::soft
