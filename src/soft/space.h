// Three reservations of address space, and the moves of physical memory between them:
//   managed  the program's view: a page is accessible only while something is mapped there
//   host     the host store: the page's place in "host memory"
//   frames   the device: frames live here while free
// Unbacked, only the first one exists, never accessible, and moves do nothing: addresses and
// virtual time without memory, for traces of any size.
// A frame (or a host page) is mapped at the managed address by moving its memory there with
// mremap(MREMAP_DONTUNMAP), and moved back on eviction. So the memory remains private anonymous: a
// forked child gets its own copy of everything, unlike with shared frames.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "base/units.h"

namespace umem::soft {

constexpr int kReadWrite = PROT_READ | PROT_WRITE;

class Space {
 public:
  // Reserves `pages` pages of managed and host space and as many frames. If the kernel refuses,
  // fewer, down to `min_pages`, and leaves addresses for the rest of the process.
  Status reserve(std::size_t pages, std::size_t min_pages, bool backed);
  void release();

  bool backed() const { return backed_; }

  std::size_t pages() const { return pages_; }
  bool contains(std::uintptr_t address) const {
    return address - managed_ < (pages_ << kPageShift);
  }
  std::size_t page_of(std::uintptr_t address) const { return (address - managed_) >> kPageShift; }
  std::uintptr_t managed(std::size_t page) const { return managed_ + (page << kPageShift); }
  // The memory of a frame that is not mapped at a page, and the page's place on the host.
  char* home(std::size_t frame) const { return at(frames_, frame); }
  char* host(std::size_t page) const { return at(host_, page); }

  // All of these return false when the kernel refuses (vm.max_map_count, most likely) and then
  // leave the mapping as it was.
  bool open_frame(std::size_t frame);    // makes a new frame accessible at home
  bool open_frames(std::size_t frames);  // and the first ones, all or none
  // Makes the places of the first pages on the host accessible, and those of as many of the first
  // frames as these pages can use.
  bool open_places(std::size_t pages, std::size_t frames);
  bool open_place(std::size_t page);  // of one page, on the host
  bool map_frame(std::size_t frame, std::size_t page, int protection);
  // `protection` is the page's present one, in case it does not move.
  bool unmap_frame(std::size_t frame, std::size_t page, int protection);
  bool map_host(std::size_t page);
  bool unmap_host(std::size_t page);
  bool protect(std::size_t page, int protection);
  // Between the page's place on the host and a frame at home.
  void copy_in(std::size_t frame, std::size_t page);
  void copy_out(std::size_t frame, std::size_t page);
  // For a page that is mapped and accessible.
  void fill(std::size_t page, unsigned char value);
  // True if the kernel refused the last of these calls.
  bool refused() const { return refused_; }
  // No pages in a row are free. Refused by the kernel, if it reserved fewer than were asked for.
  void end_of_pages() { refused_ = limited_; }
  // Gives physical memory back.
  void drop_frame(std::size_t frame) const;
  void drop_host(std::size_t page);
  void close_place(std::size_t page);  // and makes the place inaccessible

 private:
  bool keep(bool done) {
    refused_ = !done;
    return done;
  }
  bool reserve_all(std::size_t pages);
  bool may_move() const;
  bool move(void* from, int from_protection, void* to, int to_protection);
  bool leave(std::size_t page, int protection, void* home);
  static bool open(std::uintptr_t base, std::size_t& from, std::size_t to);
  static char* at(std::uintptr_t base, std::size_t index) {
    return reinterpret_cast<char*>(base + (index << kPageShift));
  }
  std::size_t pages_ = 0, open_pages_ = 0, open_frames_ = 0;
  std::uintptr_t managed_ = 0, host_ = 0, frames_ = 0;
  bool backed_ = true;
  bool limited_ = false;
  bool refused_ = false;
};

}  // namespace umem::soft
