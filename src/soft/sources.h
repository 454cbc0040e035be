// Files that pages are read from and never written to: a checkpoint has the contents of the pages
// of its tensors. They are read by O_DIRECT, like the file of evicted pages; a tensor may begin at
// any byte of such a file.
//
// `read` may run on any thread; all other calls need the caller's lock.
#pragma once
#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace umem::soft {

inline constexpr int kChanged = -2;  // instead of an error number: the file was written to

class Sources {
 public:
  static constexpr std::size_t kMost = 512;  // files at a time

  // The file's number, which is valid while it is held: once by this call, then as often as `hold`
  // is called, until as many calls of `drop`. kInvalidArgument if it cannot be read by O_DIRECT, or
  // is shorter than `bytes`.
  Result<std::uint16_t> open(const std::string& path, std::uint64_t bytes);
  void hold(std::uint16_t number) { ++files_[number].holders; }
  void drop(std::uint16_t number);
  void close();

  // Reads at most a page, wherever it begins in the file. An error number, kChanged, or 0. The rest
  // of the page is indeterminate.
  int read(std::uint16_t number, std::uint64_t offset, std::size_t bytes, char* to) const;
  const std::string& path(std::uint16_t number) const { return files_[number].path; }

 private:
  struct File {
    int file = -1;
    std::size_t holders = 0;
    std::string path;
    dev_t device = 0;
    ino_t inode = 0;
    off_t bytes = 0;
    timespec written{};
  };
  static bool same(const File& file, const struct stat& now);

  // All of kMost from the first `open` on, since `read` may run beside it; most devices open none.
  std::vector<File> files_;
};

}  // namespace umem::soft
