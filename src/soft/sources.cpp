#include "soft/sources.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/assert.h"
#include "base/units.h"
#include "soft/descriptors.h"
#include "soft/disk_calls.h"

namespace umem::soft {

namespace {

// Whole blocks into the page, then moved to its begin; the last block may not fit.
int read_blocks(int file, std::uint64_t offset, std::size_t bytes, char* to) {
  const auto call = [&](char* at, std::size_t most, off_t from) {
    return disk_calls().read(file, at, most, from);
  };
  const std::size_t skipped = offset % kBlockBytes;
  const auto from = static_cast<off_t>(offset - skipped);
  const std::size_t needed = skipped + bytes;
  const std::size_t first = std::min(needed, kPageBytes);
  if (int error = transfer(to, align_up(first, kBlockBytes), first, from, call); error != 0)
    return error;
  if (skipped == 0) return 0;
  std::memmove(to, to + skipped, first - skipped);
  if (needed <= kPageBytes) return 0;
  // Not on the stack: a signal handler's may be small.
  void* block =
      mmap(nullptr, kBlockBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (block == MAP_FAILED) return ENOMEM;
  const int error = transfer(static_cast<char*>(block), kBlockBytes, needed - kPageBytes,
                             from + static_cast<off_t>(kPageBytes), call);
  if (error == 0) std::memcpy(to + kPageBytes - skipped, block, needed - kPageBytes);
  munmap(block, kBlockBytes);
  return error;
}

}  // namespace

bool Sources::same(const File& file, const struct stat& now) {
  return now.st_size == file.bytes && now.st_mtim.tv_sec == file.written.tv_sec &&
         now.st_mtim.tv_nsec == file.written.tv_nsec;
}

Result<std::uint16_t> Sources::open(const std::string& path, std::uint64_t bytes) {
  const auto failed = [&](const std::string& why) {
    return Status(Code::kInvalidArgument, "cannot read memory from '" + path + "': " + why);
  };
  const int file = moved_up(::open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
  if (file < 0)
    return failed(errno == EINVAL ? "its file system has no O_DIRECT" : std::strerror(errno));
  struct stat now = {};
  std::string why;
  if (fstat(file, &now) != 0)
    why = std::strerror(errno);
  else if (!S_ISREG(now.st_mode))
    why = "it is no regular file";
  else if (now.st_size < 0 || static_cast<std::uint64_t>(now.st_size) < bytes)
    why = "it ends before the tensor";
  if (files_.empty()) files_.resize(kMost);
  const auto known = std::find_if(files_.begin(), files_.end(), [&](const File& each) {
    return each.file >= 0 && each.device == now.st_dev && each.inode == now.st_ino &&
           same(each, now);
  });
  const auto place = known != files_.end()
                         ? known
                         : std::find_if(files_.begin(), files_.end(),
                                        [](const File& each) { return each.holders == 0; });
  if (why.empty() && place == files_.end()) why = "too many files are open for that";
  if (!why.empty() || known != files_.end()) ::close(file);
  if (!why.empty()) return failed(why);
  if (known == files_.end())
    *place = {file, 0, path, now.st_dev, now.st_ino, now.st_size, now.st_mtim};
  ++place->holders;
  return static_cast<std::uint16_t>(place - files_.begin());
}

void Sources::drop(std::uint16_t number) {
  File& file = files_[number];
  UMEM_ASSERT(file.holders > 0, "a file that is dropped was held");
  if (--file.holders == 0) ::close(std::exchange(file.file, -1));
}

void Sources::close() {
  for (const File& each : files_)
    if (each.file >= 0) ::close(each.file);
  files_.clear();
}

// The times change before the bytes do, so a change during the transfer is seen after it.
int Sources::read(std::uint16_t number, std::uint64_t offset, std::size_t bytes, char* to) const {
  const File& file = files_[number];
  const int error = read_blocks(file.file, offset, bytes, to);
  struct stat now = {};
  if (fstat(file.file, &now) != 0) return errno;
  return same(file, now) ? error : kChanged;
}

}  // namespace umem::soft
