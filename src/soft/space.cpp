#include "soft/space.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/process_limits.h"

namespace umem::soft {
namespace {

#ifndef MREMAP_DONTUNMAP
constexpr int MREMAP_DONTUNMAP = 4;
#endif
// Left to the rest of the process at a limit, so that it takes none of a page that moves.
constexpr std::size_t kSpareBytes = std::size_t{16} << 20;
constexpr int kReservation = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

std::uintptr_t reserve_aligned(std::size_t bytes, int protection) {
  void* raw = mmap(nullptr, bytes + kPageBytes, protection, kReservation, -1, 0);
  if (raw == MAP_FAILED) return 0;
  const auto start = reinterpret_cast<std::uintptr_t>(raw);
  const std::uintptr_t base = align_up(start, kPageBytes);
  if (base > start) munmap(raw, base - start);
  const std::uintptr_t tail = start + kPageBytes - base;
  if (tail > 0) munmap(reinterpret_cast<void*>(base + bytes), tail);
  return base;
}

// Reserves memory to be moved elsewhere and back; the advice moves along.
std::uintptr_t reserve_home(std::size_t bytes) {
  const std::uintptr_t base = reserve_aligned(bytes, PROT_NONE);
  if (!base) return 0;
  auto* area = reinterpret_cast<void*>(base);
  madvise(area, bytes, MADV_HUGEPAGE);  // 10 times cheaper moves; works without
  madvise(area, bytes, MADV_DONTDUMP);
  return base;
}

bool set_protection(void* where, int protection, std::size_t pages = 1) {
  return mprotect(where, pages << kPageShift, protection) == 0;
}

bool remap(void* from, void* to) {
  return mremap(from, kPageBytes, kPageBytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP,
                to) != MAP_FAILED;
}

// Moves the memory of one page from `from` to `to`, whose reservation is replaced, and leaves an
// inaccessible reservation at `from`. No thread sees an accessible page without its contents, nor a
// hole that another mmap could take. On failure nothing changes.
bool move_page(void* from, int from_protection, void* to, int to_protection) {
  if (!set_protection(from, PROT_NONE)) return false;
  if (remap(from, to)) {
    if (set_protection(to, to_protection)) return true;
    remap(to, from);
  }
  set_protection(from, from_protection);
  return false;
}

Status probe_dontunmap() {
  void* from = mmap(nullptr, kPageBytes, PROT_NONE, kReservation, -1, 0);
  if (from == MAP_FAILED) return {Code::kNotSupported, "the kernel refuses to reserve memory"};
  void* to = mremap(from, kPageBytes, kPageBytes, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, nullptr);
  const int error = errno;
  munmap(from, kPageBytes);
  if (to == MAP_FAILED)
    return {
        Code::kNotSupported,
        std::string("the software device needs mremap(MREMAP_DONTUNMAP), Linux 5.7 or newer: ") +
            std::strerror(error)};
  munmap(to, kPageBytes);
  return {};
}

}  // namespace

Status Space::reserve(std::size_t pages, std::size_t min_pages, bool backed) {
  if (backed) UMEM_RETURN_IF_ERROR(probe_dontunmap());
  backed_ = backed;
  limited_ = !reserve_all(pages);
  if (!limited_) return {};
  const auto fewer = [&] { return pages = std::max(pages - (pages + 7) / 8, min_pages); };
  while (pages > min_pages && !reserve_all(fewer())) continue;
  release();
  if (reserve_all(fewer())) return {};
  return {Code::kOutOfHostMemory,
          "cannot reserve address space for the software device (limited by `ulimit -v`?)"};
}

bool Space::reserve_all(std::size_t pages) {
  const std::size_t bytes = pages << kPageShift;
  pages_ = pages;
  managed_ = reserve_aligned(bytes, PROT_NONE);
  if (managed_ && !backed_) return true;
  host_ = reserve_home(bytes);
  frames_ = reserve_home(bytes);
  if (managed_ && host_ && frames_) return true;
  release();
  return false;
}

void Space::release() {
  for (std::uintptr_t* base : {&managed_, &host_, &frames_}) {
    if (*base) munmap(reinterpret_cast<void*>(*base), pages_ << kPageShift);
    *base = 0;
  }
  pages_ = open_pages_ = open_frames_ = 0;
}

// If a limit was set below what the process has, a move fails halfway, and cannot be undone: its
// destination is no longer a reservation, or nothing may be made writable.
bool Space::may_move() const {
  struct rlimit address_space = {};
  getrlimit(RLIMIT_AS, &address_space);
  return address_space.rlim_cur >= 3 * (pages_ << kPageShift) && !exceeds_data_limit(0);
}

bool Space::move(void* from, int from_protection, void* to, int to_protection) {
  return may_move() && move_page(from, from_protection, to, to_protection);
}

// Moves the page's memory home. The remains of a move would be a separate mapping forever; a new
// reservation merges with its neighbours, so that resident pages bound the mappings.
bool Space::leave(std::size_t page, int protection, void* home) {
  void* place = at(managed_, page);
  if (!move(place, protection, home, kReadWrite)) return false;
  // Not by mmap(), which sanitizers take for a write to bytes that other threads may be reading. If
  // the kernel refuses, the place is unchanged.
  syscall(SYS_mmap, place, kPageBytes, PROT_NONE, kReservation | MAP_FIXED, -1, 0);
  return true;
}

bool Space::open_frame(std::size_t index) {
  if (!backed_) return true;
  if (!keep(set_protection(home(index), kReadWrite))) return false;
  open_frames_ = std::max(open_frames_, index + 1);
  return true;
}

bool Space::open(std::uintptr_t base, std::size_t& from, std::size_t to) {
  if (to <= from) return true;
  const std::size_t more = to - from;
  if (exceeds_data_limit((more << kPageShift) + kSpareBytes)) return false;
  if (!set_protection(at(base, from), kReadWrite, more)) return false;
  from = to;
  return true;
}

bool Space::open_frames(std::size_t frames) {
  return keep(!backed_ || (frames <= pages_ && open(frames_, open_frames_, frames)));
}

// Not all at once: RLIMIT_DATA counts what is writable, used or not.
bool Space::open_places(std::size_t pages, std::size_t frames) {
  pages = std::max(pages, open_pages_);
  // Frames first, as a page fault that finds none ends the process.
  return keep(!backed_ || (open(frames_, open_frames_, std::min(frames, pages)) &&
                           open(host_, open_pages_, pages)));
}

bool Space::open_place(std::size_t page) {
  return !backed_ || keep(set_protection(host(page), kReadWrite));
}

bool Space::map_frame(std::size_t index, std::size_t page, int protection) {
  return !backed_ || keep(move(home(index), kReadWrite, at(managed_, page), protection));
}

bool Space::unmap_frame(std::size_t index, std::size_t page, int protection) {
  return !backed_ || keep(leave(page, protection, home(index)));
}

bool Space::map_host(std::size_t page) {
  return !backed_ || keep(move(host(page), kReadWrite, at(managed_, page), kReadWrite));
}

bool Space::unmap_host(std::size_t page) {
  return !backed_ || keep(leave(page, kReadWrite, host(page)));
}

bool Space::protect(std::size_t page, int protection) {
  return !backed_ || keep(set_protection(at(managed_, page), protection));
}

void Space::copy_in(std::size_t index, std::size_t page) {
  if (backed_) std::memcpy(home(index), host(page), kPageBytes);
}

void Space::copy_out(std::size_t index, std::size_t page) {
  if (backed_) std::memcpy(host(page), home(index), kPageBytes);
}

void Space::fill(std::size_t page, unsigned char value) {
  if (backed_) std::memset(at(managed_, page), value, kPageBytes);
}

void Space::drop_frame(std::size_t index) const {
  if (backed_) madvise(home(index), kPageBytes, MADV_DONTNEED);
}

void Space::drop_host(std::size_t page) {
  if (backed_) madvise(host(page), kPageBytes, MADV_DONTNEED);
}

void Space::close_place(std::size_t page) {
  drop_host(page);
  if (backed_) set_protection(host(page), PROT_NONE);
}

}  // namespace umem::soft
