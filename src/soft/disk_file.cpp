#include "soft/disk_file.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "base/assert.h"
#include "base/format.h"
#include "soft/descriptors.h"
#include "soft/disk_calls.h"

namespace umem::soft {
namespace {

constexpr long kTmpfs = 0x01021994, kRamfs = 0x858458F6;

// Four independent lanes, since one would wait for each product; written out, as compilers keep an
// array of them in memory. Each step is a bijection of its lane, so a single wrong word always
// changes the result.
std::uint64_t checksum(const char* page) {
  constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15;
  const auto mix = [](std::uint64_t lane, std::uint64_t word) {
    lane = (lane ^ word) * kFactor;
    return lane ^ (lane >> 32);
  };
  std::uint64_t a = 1, b = 2, c = 3, d = 4;
  for (const char* at = page; at != page + kPageBytes; at += 32) {
    std::uint64_t words[4];
    std::memcpy(words, at, sizeof words);
    a = mix(a, words[0]);
    b = mix(b, words[1]);
    c = mix(c, words[2]);
    d = mix(d, words[3]);
  }
  return mix(mix(mix(a, b), c), d);
}

off_t offset_of(const Slot& slot) {
  return static_cast<off_t>(slot.number - 1) << kPageShift;
}

}  // namespace

// A negative number if the folder cannot hold the file; `problem` then tells why.
int DiskFile::open_file(std::string& problem) const {
  struct statfs system = {};
  if (statfs(folder_.c_str(), &system) != 0) {
    problem = std::strerror(errno);
    return -1;
  }
  if (system.f_type == kTmpfs || system.f_type == kRamfs) {
    problem = "it is in this machine's memory (tmpfs); name a folder on a disk";
    return -1;
  }
  constexpr int kFlags = O_RDWR | O_DIRECT | O_CLOEXEC;
  int file = ::open(folder_.c_str(), O_TMPFILE | kFlags, 0600);
  if (file < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) {  // no files without a name
    std::string name = folder_ + "/umem-XXXXXX";
    file = mkostemp(name.data(), O_CLOEXEC);
    if (file >= 0) unlink(name.c_str());
    if (file >= 0 && fcntl(file, F_SETFL, O_DIRECT) != 0) {
      const int error = errno;
      ::close(file);
      file = -1;
      errno = error;
    }
  }
  if (file < 0)
    problem = errno == EINVAL ? "its file system has no O_DIRECT; name a folder on another one"
                              : std::strerror(errno);
  return moved_up(file);
}

Status DiskFile::open(const std::string& folder, std::size_t limit_pages, std::size_t max_pages) {
  folder_ = folder;
  std::string problem;
  const int file = open_file(problem);
  if (file < 0)
    return {Code::kInvalidArgument, "cannot keep evicted memory in '" + folder + "': " + problem};
  files_.fill(-1);
  files_[0] = file;
  limit_ = limit_pages > 0 ? std::min(limit_pages, max_pages) : max_pages;
  try {
    for (std::vector<std::uint32_t>* table : {&free_, &epoch_}) table->reserve(max_pages);
    left_.reserve(max_pages);
  } catch (const std::bad_alloc&) {
    close();
    return {Code::kOutOfHostMemory, "no memory for the table of the file of evicted memory"};
  }
  return {};
}

void DiskFile::close() {
  sources_.close();
  for (int& file : files_) {
    if (file >= 0) ::close(file);
    file = -1;
  }
  forget_slots();
  current_ = 0;
  is_own_ = true;
  is_child_ = false;
  reserved_ = 0;
}

// Those of the current file, and who may read them.
void DiskFile::forget_slots() {
  for (const Lease& lease : leases_) ::close(lease.file);
  leases_.clear();
  free_.clear();
  left_.clear();
  epoch_.clear();
  capacity_ = 0;
}

bool DiskFile::reserve(std::size_t pages) {
  if (pages > limit_ || reserved_ > limit_ - pages) return false;
  const std::size_t needed = reserved_ + pages;
  if (!is_child_ && needed > capacity_ && !grow(needed - capacity_)) return false;
  reserved_ = needed;
  return true;
}

bool DiskFile::grow(std::size_t pages) {
  if (!is_own_ || capacity_ + pages > epoch_.capacity()) return false;
  const auto reserve = [&](std::size_t more) {
    const int file = files_[current_];
    const auto end = static_cast<off_t>(capacity_ << kPageShift);
    if (disk_calls().reserve(file, end, static_cast<off_t>(more << kPageShift)) == 0) return true;
    // The file would keep what the refused call took: all that was free.
    [[maybe_unused]] const int cut = ftruncate(file, end);
    return false;
  };
  // Some more for later, within the limit and if the disk has room.
  const std::size_t left = limit_ - std::min(limit_, capacity_ + pages);
  std::size_t more = pages + std::min(left, kGrowth);
  if (!reserve(more)) {
    more = pages;
    if (!reserve(more)) return false;
  }
  epoch_.resize(capacity_ + more);
  for (std::size_t i = more; i > 0; --i) free_.push_back(static_cast<std::uint32_t>(capacity_ + i));
  capacity_ += more;
  return true;
}

// Forgets children that have ended, or run another program.
void DiskFile::end_leases() {
  const std::size_t before = leases_.size();
  std::erase_if(leases_, [](const Lease& lease) {
    pollfd ended{lease.file, POLLIN, 0};
    if (poll(&ended, 1, 0) <= 0 || (ended.revents & POLLNVAL)) return false;
    ::close(lease.file);
    return true;
  });
  if (leases_.size() == before) return;
  ended_ += before - leases_.size();
  std::erase_if(left_, [&](const Left& slot) {
    if (std::any_of(leases_.begin(), leases_.end(), [&](const Lease& lease) {
          return slot.written <= lease.epoch && lease.epoch < slot.left;
        }))
      return false;
    free_.push_back(slot.number);
    return true;
  });
}

bool DiskFile::has_room() {
  end_leases();
  return leases_.empty() || !free_.empty() || std::exchange(ended_, 0) > 0;
}

bool DiskFile::is_read_by_children(std::uint32_t number) {
  if (!leases_.empty()) end_leases();
  return !leases_.empty() && epoch_[number - 1] <= leases_.back().epoch;
}

bool DiskFile::take(Slot& slot) {
  if (slot.number != 0 && slot.file == current_ && is_own_ && !is_read_by_children(slot.number)) {
    epoch_[slot.number - 1] = epoch_now_;
    return true;
  }
  // Beyond the limit, if children read old versions.
  if (free_.empty() && !grow(1)) return false;
  give(slot);
  slot.number = free_.back();
  slot.file = current_;
  free_.pop_back();
  epoch_[slot.number - 1] = epoch_now_;
  return true;
}

void DiskFile::give(Slot& slot) {
  if (slot.in_source()) {
    sources_.drop(slot.source());
    slot = {};
    return;
  }
  const std::uint16_t file = slot.file;
  const std::uint32_t number = std::exchange(slot, {}).number;
  if (number == 0 || file != current_ || !is_own_) return;
  if (is_read_by_children(number))
    left_.push_back({number, epoch_[number - 1], epoch_now_});
  else
    free_.push_back(number);
}

Slot DiskFile::place_in(std::uint16_t source, std::uint64_t offset, std::size_t bytes) {
  sources_.hold(source);
  return {static_cast<std::uint32_t>(bytes), static_cast<std::uint16_t>(Slot::kSource + source),
          offset};
}

int DiskFile::write(Slot& slot, const char* from) const {
  slot.sum = checksum(from);
  return transfer(const_cast<char*>(from), kPageBytes, kPageBytes, offset_of(slot),
                  [&](const char* at, std::size_t bytes, off_t offset) {
                    return disk_calls().write(files_[slot.file], at, bytes, offset);
                  });
}

int DiskFile::read(const Slot& slot, char* to) const {
  if (slot.in_source()) return sources_.read(slot.source(), slot.sum, slot.number, to);
  const auto call = [&](char* at, std::size_t bytes, off_t offset) {
    return disk_calls().read(files_[slot.file], at, bytes, offset);
  };
  if (const int error = transfer(to, kPageBytes, kPageBytes, offset_of(slot), call); error != 0)
    return error;
  return checksum(to) == slot.sum ? 0 : kDamaged;
}

void DiskFile::prepare_fork() {
  end_leases();
  // Without a pipe, children are taken to never end: nothing that they may read is overwritten.
  if (pipe2(pipe_.data(), O_CLOEXEC) != 0) pipe_ = {-1, -1};
  for (int& end : pipe_) end = moved_up(end);
}

void DiskFile::forked_parent() {
  if (pipe_[1] >= 0) ::close(pipe_[1]);
  leases_.push_back({pipe_[0], epoch_now_++});
}

void DiskFile::forked_child() {
  if (pipe_[0] >= 0) ::close(pipe_[0]);  // the other end ends with the process
  forget_slots();
  is_child_ = true;
  std::string problem;
  const int file = current_ + 1u < kFiles ? open_file(problem) : -1;
  is_own_ = file >= 0;
  if (is_own_) files_[++current_] = file;
}

}  // namespace umem::soft
