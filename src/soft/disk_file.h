// The file of evicted pages: without a name, so that no way of ending the process leaves anything
// behind, and accessed by O_DIRECT, so that no byte of it is in this machine's memory twice.
//
// Blocks of the file are reserved for every page that is allocated, because a full disk must be
// noticed at an allocation and never at an eviction. A forked child reads what was written before
// the fork from the same file and writes to one of its own; the parent overwrites nothing that a
// child may read.
//
// `write` and `read` may run on any thread; all other calls need the caller's lock.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/units.h"
#include "soft/sources.h"

namespace umem::soft {

// A page's place in one of the files, and the checksum of what was written there; or its place in a
// source.
struct Slot {
  static constexpr std::uint16_t kSource = 32;  // the first number of sources in `file`

  std::uint32_t number = 0;  // index + 1; in a source the number of bytes; 0: none
  std::uint16_t file = 0;
  std::uint64_t sum = 0;  // in a source the offset

  bool in_source() const { return number != 0 && file >= kSource; }
  std::uint16_t source() const { return static_cast<std::uint16_t>(file - kSource); }
};

inline constexpr int kDamaged = -1;  // instead of an error number: other bytes than were written

class DiskFile {
 public:
  // `limit_pages`: of the file. kInvalidArgument if `folder` cannot hold such a file.
  Status open(const std::string& folder, std::size_t limit_pages, std::size_t max_pages);
  void close();

  // Blocks for `pages` more pages. False if the disk or the limit has no room for them.
  bool reserve(std::size_t pages);
  void release(std::size_t pages) { reserved_ -= pages; }

  // A place for the page's next version: its own, unless a child may read that. False if none.
  bool take(Slot& slot);
  void give(Slot& slot);

  // The files that have contents of pages.
  Sources& sources() { return sources_; }
  Slot place_in(std::uint16_t source, std::uint64_t offset, std::size_t bytes);

  // Transfer a whole page. An error number, kDamaged, kChanged, or 0. `write` sets the checksum.
  int write(Slot& slot, const char* from) const;
  int read(const Slot& slot, char* to) const;

  // True if a disk that was full may take more now.
  bool has_room();
  bool is_shared() const { return !leases_.empty(); }

  void prepare_fork();
  void forked_parent();
  void forked_child();

  const std::string& folder() const { return folder_; }
  const Sources& sources() const { return sources_; }
  std::size_t bytes() const { return capacity_ << kPageShift; }

 private:
  // This process has one, and may read those of the processes that it was forked from.
  static constexpr std::size_t kFiles = Slot::kSource;
  static constexpr std::size_t kGrowth = 64;  // pages

  int open_file(std::string& problem) const;
  bool grow(std::size_t pages);
  void forget_slots();
  void end_leases();
  bool is_read_by_children(std::uint32_t number);

  std::string folder_;
  Sources sources_;
  std::array<int, kFiles> files_{};
  std::uint16_t current_ = 0;
  bool is_own_ = true;     // false in a child for which no file could be made
  bool is_child_ = false;  // whose file grows with what it writes: most children write nothing
  std::size_t limit_ = 0, capacity_ = 0, reserved_ = 0;
  // With room for all pages: a fault handler may take and give slots.
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> epoch_;  // of each slot's last write
  // Free, but children may read them that were forked in these epochs: [written, left).
  struct Left {
    std::uint32_t number, written, left;
  };
  std::vector<Left> left_;
  struct Lease {
    int file;  // the reading end of a pipe whose writing end children hold
    std::uint32_t epoch;
  };
  std::vector<Lease> leases_;
  std::size_t ended_ = 0;  // leases, since the last `has_room`
  std::uint32_t epoch_now_ = 0;
  std::array<int, 2> pipe_{-1, -1};
};

}  // namespace umem::soft
