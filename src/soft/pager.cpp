#include "soft/pager.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "soft/move_log.h"

namespace umem::soft {
namespace {

// Managed address space: enough for the largest host, and cheap since only reserved.
constexpr std::size_t kSpacePages = (std::size_t{1} << 40) >> kPageShift;
// Unbacked: more than any trace can exhaust.
constexpr std::size_t kUnbackedPages = (std::size_t{1} << 44) >> kPageShift;
constexpr unsigned char kPoison = 0xDB;   // the contents of a discarded page under set_poison
constexpr std::uint32_t kMaxFetches = 2;  // of a page by faults, in one operation

// How a page with a frame is mapped.
int protection_of(const Page& page) {
  if (page.state == PageState::kDuplicate || page.read_only) return PROT_READ;
  return page.state == PageState::kDiscarded ? PROT_NONE : kReadWrite;
}

bool is_open(const Page& page, bool writes) {
  const int needed = writes ? kReadWrite : PROT_READ;
  return (protection_of(page) & needed) == needed;
}

}  // namespace

Status Pager::open(std::size_t frames, bool backed, bool uvm, const DiskOptions& disk) {
  const std::size_t pages = backed ? kSpacePages : kUnbackedPages;
  UMEM_RETURN_IF_ERROR(space_.reserve(pages, frames, backed));
  const std::size_t bytes = space_.pages() * sizeof(Page);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    space_.release();
    return {Code::kOutOfHostMemory, "cannot reserve the software device's page table"};
  }
  pages_ = static_cast<Page*>(memory);
  free_space_.emplace(0, space_.pages());
  frames_ = frames;
  opened_ = used_ = peak_ = host_pages_ = peak_host_pages_ = fixed_ = 0;
  uvm_ = uvm;
  if (disk.folder.empty()) {
    reserve_frames(frames);
    return {};
  }
  Status status = disk_.open(disk, space_);
  staging_ = disk.staging;
  Moved nothing;
  if (status.ok() && !set_frames_of_disk(frames, nothing))
    status = {Code::kOutOfHostMemory, "the kernel refuses the memory of the software device"};
  if (!status.ok()) close();
  return status;
}

void Pager::close() {
  disk_.close();
  set_aside_.clear();
  last_ticket_ = first_arriving_ = last_arriving_ = 0;
  munmap(pages_, space_.pages() * sizeof(Page));
  pages_ = nullptr;
  space_.release();
  allocations_.clear();
  free_space_.clear();
  free_frames_.clear();
  used_list_ = discarded_ = unused_ = held_ = thrashing_ = {};
  operation_ = 0;
  thrashed_ = 0;
}

Pager::Extent Pager::allocate(std::size_t count) {
  for (auto it = free_space_.begin(); it != free_space_.end(); ++it) {
    if (it->second < count) continue;
    const std::size_t first = it->first;
    // With a disk, places on the host are opened one by one, for the few pages that need them.
    const std::size_t places = disk_.on() ? 0 : first + count;
    if (!space_.open_places(places, frames_) || (disk_.on() && !disk_.reserve(count))) return {};
    const std::size_t rest = it->second - count;
    free_space_.erase(it);
    if (rest > 0) free_space_.emplace(first + count, rest);
    allocations_.emplace(first, count);
    for (std::size_t i = first; i < first + count; ++i) {
      UMEM_ASSERT(!pages_[i].allocated, "allocations do not overlap");
      pages_[i] = Page{};
      pages_[i].allocated = true;
    }
    return {first, count};
  }
  space_.end_of_pages();
  return {};
}

bool Pager::free(Extent extent) {
  UMEM_ASSERT(allocations_.count(extent.first) && allocations_[extent.first] == extent.count,
              "free takes an allocation");
  for (std::size_t i = extent.first; i < extent.first + extent.count; ++i)
    if (!release_page(i)) return false;
  for (std::size_t i = extent.first; i < extent.first + extent.count; ++i) pages_[i] = Page{};
  allocations_.erase(extent.first);
  if (disk_.on()) disk_.release(extent.count);
  auto it = free_space_.emplace(extent.first, extent.count).first;
  if (auto next = std::next(it);
      next != free_space_.end() && it->first + it->second == next->first) {
    it->second += next->second;
    free_space_.erase(next);
  }
  if (it != free_space_.begin()) {
    auto prev = std::prev(it);
    if (prev->first + prev->second == it->first) {
      prev->second += it->second;
      free_space_.erase(it);
    }
  }
  return true;
}

// For a page that has a frame with contents, or receives one.
void Pager::note(MoveKind kind, std::size_t index) {
  if (!log_) return;
  const bool leaves = kind != MoveKind::kIn && kind != MoveKind::kFill && kind != MoveKind::kCopy;
  log_->note(kind, index, leaves && pages_[index].untouched);
  if (kind != MoveKind::kCopy) pages_[index].untouched = kind == MoveKind::kIn;
}

void Pager::note_held() {
  for (const auto& [first, count] : allocations_)
    for (std::size_t i = first; i < first + count; ++i)
      if (const PageState state = pages_[i].state;
          state == PageState::kDevice || state == PageState::kDuplicate)
        log_->note(MoveKind::kHeld, i);
}

// Returns a page's frame and host memory, in any state; it is a void page afterwards.
bool Pager::release_page(std::size_t index) {
  Page& page = pages_[index];
  if (mapped_from_host(page) && !unmap_remote(index)) return false;
  if (page.arriving) drop_arriving(index);
  forget_copy(index);  // first: it may be written from where it is mapped
  const bool framed = page.state != PageState::kVoid && page.state != PageState::kHost;
  if (framed) {
    if (page.state != PageState::kDiscarded) note(MoveKind::kFree, index);
    if (!space_.unmap_frame(page.frame, index, protection_of(page))) return false;
    if (page.pinned || held(page)) --fixed_;
    if (!page.pinned) remove(list_of(page), index);
    give_frame(page.frame);
  }
  if (page.attached) detach(index);
  if (disk_.on()) disk_.forget(index);
  if (page.host_backed) {
    drop_host(index);
    UMEM_ASSERT(host_pages_ > 0, "a page on the host is counted");
    --host_pages_;
  }
  page = Page{};
  page.allocated = true;
  return true;
}

Pager::Extent Pager::find(std::uintptr_t address) const {
  if (!space_.contains(address)) return {};
  const std::size_t page = space_.page_of(address);
  auto it = allocations_.upper_bound(page);
  if (it == allocations_.begin()) return {};
  --it;
  if (page >= it->first + it->second) return {};
  return {it->first, it->second};
}

void Pager::append(List& list, std::size_t index) {
  Page& page = pages_[index];
  UMEM_ASSERT(page.prev == 0 && page.next == 0 && list.head != index + 1,
              "a page is in one list, once");
  page.prev = list.tail;
  page.next = 0;
  const auto id = static_cast<std::uint32_t>(index + 1);
  if (list.tail) pages_[list.tail - 1].next = id;
  list.tail = id;
  if (!list.head) list.head = id;
  ++list.pages;
  peak_ = std::max(peak_, held_frames());
}

void Pager::remove(List& list, std::size_t index) {
  Page& page = pages_[index];
  UMEM_ASSERT((page.prev ? pages_[page.prev - 1].next : list.head) == index + 1,
              "the list has the page");
  (page.prev ? pages_[page.prev - 1].next : list.head) = page.next;
  (page.next ? pages_[page.next - 1].prev : list.tail) = page.prev;
  page.prev = page.next = 0;
  --list.pages;
}

bool Pager::shrink_to(std::size_t frames, Moved& moved) {
  while (used_ > frames)
    if (!free_a_frame(moved)) return false;
  return true;
}

bool Pager::free_a_frame(Moved& moved) {
  if (unused_.head) {
    detach(unused_.head - 1);
    return true;
  }
  if (discarded_.head) return evict(discarded_.head - 1, Frame::kGiven, moved);
  if (calls_hold_too_much() && held_.head && hand_over(held_.head - 1, moved)) return true;
  const bool clean_only = disk_.on() && !disk_.writable();
  for (std::uint32_t id = used_list_.head, next = 0; id != 0; id = next) {
    next = pages_[id - 1].next;
    if (clean_only && !pages_[id - 1].on_disk) continue;
    if (evict(id - 1, Frame::kGiven, moved)) return true;
    if (!disk_.on()) return false;  // another page's copy may be on the disk
  }
  return held_.head && hand_over(held_.head - 1, moved);
}

// A disk that takes no more leaves pages in the frames that transfers had.
std::size_t Pager::usable_frames() {
  if (!disk_.on()) return frames_;
  const std::size_t all = opened_ - set_aside_.size();
  const std::size_t usable = all - std::min(disk_.stuck(), all - 1);
  return disk_.writable() ? std::min(frames_, usable) : usable;
}

bool Pager::take_frame(std::uint32_t& frame, Moved& moved) {
  if (frames_ == 0 || !shrink_to(usable_frames() - 1, moved)) return false;
  if (disk_.on()) {
    while ((frame = disk_.take()) == Disk::kNoFrame)
      if (!free_a_frame(moved)) return false;
    ++used_;
    return true;
  }
  if (!free_frames_.empty()) {
    frame = free_frames_.back();
    free_frames_.pop_back();
  } else {
    if (opened_ >= space_.pages() || !space_.open_frame(opened_)) return false;
    frame = static_cast<std::uint32_t>(opened_++);
  }
  ++used_;
  UMEM_ASSERT(used_ <= frames_, "no more frames are used than the device has");
  UMEM_ASSERT(used_ + free_frames_.size() == opened_, "a frame is used or free");
  return true;
}

void Pager::give_frame(std::uint32_t frame) {
  UMEM_ASSERT(used_ > 0, "a frame that is given was taken");
  if (disk_.on()) {
    --used_;
    if (frame != Disk::kNoFrame) disk_.give(frame);
    return;
  }
  UMEM_ASSERT(free_frames_.size() < free_frames_.capacity(),
              "the fault handler allocates no memory");
  --used_;
  free_frames_.push_back(frame);  // capacity is reserved for every frame that was ever allowed
}

void Pager::hold_host(Page& page) {
  if (page.host_backed) return;
  page.host_backed = true;
  peak_host_pages_ = std::max(peak_host_pages_, ++host_pages_);
}

void Pager::drop_host(std::size_t index) {
  disk_.on() ? space_.close_place(index) : space_.drop_host(index);
}

// The frame that is kept for the page, or another one.
bool Pager::frame_for(std::size_t index, std::uint32_t& frame, Moved& moved) {
  Page& page = pages_[index];
  if (!page.attached) return take_frame(frame, moved);
  remove(unused_, index);
  page.attached = false;
  frame = page.frame;
  return true;
}

// Takes the frame from a page that has no contents in it.
void Pager::detach(std::size_t index) {
  Page& page = pages_[index];
  UMEM_ASSERT(page.attached, "only a kept frame is detached");
  remove(unused_, index);
  page.attached = false;
  give_frame(page.frame);
}

bool Pager::take_from(std::size_t index, Moved& moved) {
  if (held(pages_[index])) return false;
  if (!pages_[index].attached) return evict(index, Frame::kGiven, moved);
  detach(index);
  return true;
}

// Gives the page a frame and its contents, and maps it.
bool Pager::bring(std::size_t index, Moved& moved) {
  Page& page = pages_[index];
  UMEM_ASSERT(page.state == PageState::kVoid || page.state == PageState::kHost,
              "a page has one frame");
  if (page.on_disk) return read(index, moved);
  std::uint32_t frame = 0;
  const bool kept = page.attached;
  if (!frame_for(index, frame, moved)) return false;
  const bool copy = page.state == PageState::kHost;
  const bool duplicate = copy && page.read_mostly && !disk_.on();
  if (copy) space_.copy_in(frame, index);
  if (!space_.map_frame(frame, index, duplicate ? PROT_READ : kReadWrite)) {
    give_frame(frame);
    return false;
  }
  if (copy) moved.bytes_in += kPageBytes;
  note(copy ? MoveKind::kIn : MoveKind::kFill, index);
  if (kept && !copy && poison_) space_.fill(index, kPoison);  // a kept frame has the old bytes
  if (copy && disk_.on()) drop_host(index);
  page.frame = frame;
  page.state = duplicate ? PageState::kDuplicate : PageState::kDevice;
  ++page.arrivals;
  append(used_list_, index);
  return true;
}

// Gives the page a frame, and asks the disk for its contents unless they have not left yet.
bool Pager::read(std::size_t index, Moved& moved) {
  Page& page = pages_[index];
  // A page that could not be written has its frame still.
  const bool framed = disk_.has_frame(index);
  if (frames_ == 0 || (!framed && !shrink_to(usable_frames() - 1, moved))) return false;
  const Disk::Kept kept = disk_.keep(index, page.frame);
  page.on_disk = kept.on_disk;
  const bool duplicate = page.in_source || (page.read_mostly && (kept.on_disk || disk_.writable()));
  const bool writable = !duplicate && !kept.on_disk;
  if (kept.frame && !space_.map_frame(page.frame, index, writable ? kReadWrite : PROT_READ)) {
    write(index, space_.home(page.frame), true);
    return false;
  }
  ++used_;
  ++page.arrivals;
  note(MoveKind::kIn, index);
  page.state = duplicate ? PageState::kDuplicate : PageState::kDevice;
  page.read_only = !duplicate && !writable;  // until a write it leaves without one
  append(used_list_, index);
  moved.bytes_in += kPageBytes;  // as asked for: the disk counts what it transfers
  if (kept.frame) {
    if (duplicate && !kept.on_disk) write_mapped(index);
    return true;
  }
  disk_.read(index);
  page.arriving = true;
  page.ticket = ++last_ticket_;
  page.before = last_arriving_;
  page.after = 0;
  const auto id = static_cast<std::uint32_t>(index + 1);
  (page.before ? pages_[page.before - 1].after : first_arriving_) = id;
  last_arriving_ = id;
  return true;
}

void Pager::end_arrival(std::size_t index) {
  Page& page = pages_[index];
  (page.before ? pages_[page.before - 1].after : first_arriving_) = page.after;
  (page.after ? pages_[page.after - 1].before : last_arriving_) = page.before;
  page.arriving = false;
}

// If the disk cannot be read, or the kernel refuses, the page is still on the disk alone.
bool Pager::settle(std::size_t index) {
  Page& page = pages_[index];
  if (!page.arriving) return true;
  end_arrival(index);
  if (disk_.await(index, page.frame) && space_.map_frame(page.frame, index, PROT_READ)) return true;
  remove(list_of(page), index);
  page.state = PageState::kHost;
  page.read_only = false;
  give_frame(page.frame);
  return false;
}

// The disk has what an arriving page has.
void Pager::drop_arriving(std::size_t index) {
  end_arrival(index);
  note(MoveKind::kDrop, index);
  remove(list_of(pages_[index]), index);
  pages_[index].state = PageState::kHost;
  pages_[index].read_only = false;
  give_frame(disk_.drop(index));
}

void Pager::arrive(std::uint32_t ticket) {
  while (first_arriving_ != 0) {
    const std::size_t index = first_arriving_ - 1;
    if (static_cast<std::int32_t>(pages_[index].ticket - ticket) > 0) return;
    settle(index);  // if that fails, an access tries again and tells
  }
}

void Pager::write(std::size_t index, const char* from, bool gives) {
  Page& page = pages_[index];
  hold_host(page);
  page.on_disk = true;
  page.read_only = false;
  disk_.write(index, page.frame, from, gives);
}

// A page that nothing can write without a fault.
void Pager::write_mapped(std::size_t index) {
  write(index, reinterpret_cast<const char*>(space_.managed(index)), false);
}

// The disk's contents of the page are of no use from now on. A page that is mapped there stays
// read-only until it is made writable.
void Pager::forget_copy(std::size_t index) {
  Page& page = pages_[index];
  const bool in_source = std::exchange(page.in_source, false);
  if (!std::exchange(page.on_disk, false)) return;
  if (page.state == PageState::kDuplicate) {
    page.state = PageState::kDevice;
    page.read_only = true;
  }
  std::uint32_t frame = 0;
  const bool has_frame = page.state != PageState::kHost;
  if (disk_.keep(index, frame).frame && !has_frame) disk_.give(frame);
  if (in_source) disk_.forget(index);  // lets go of the file
}

// Moves a page's contents from the host store to the disk. They remain there if that fails.
void Pager::save_host(std::size_t index) {
  Page& page = pages_[index];
  if (!disk_.on() || !disk_.writable() || !disk_.write_from(index, space_.host(index))) return;
  page.on_disk = true;
  drop_host(index);
}

// Unmaps the page, saving the contents on the host if they live only on the device.
bool Pager::evict(std::size_t index, Frame then, Moved& moved) {
  Page& page = pages_[index];
  UMEM_ASSERT(!page.pinned, "plain device memory is never evicted");
  UMEM_ASSERT(page.windows == 0, "pages of a system call do not move");
  UMEM_ASSERT(page.state != PageState::kVoid && page.state != PageState::kHost,
              "a page without a frame is not evicted");
  if (page.arriving) {
    drop_arriving(index);
    return true;
  }
  if (page.state == PageState::kDuplicate && page.on_disk &&
      !disk_.keep(index, page.frame).on_disk) {
    page.on_disk = false;
    page.state = PageState::kDevice;
    page.read_only = true;  // as it is mapped
  }
  const bool dirty = page.state == PageState::kDevice && !page.on_disk;
  if (dirty && disk_.on() && !disk_.writable()) return false;
  if (!space_.unmap_frame(page.frame, index, protection_of(page))) return false;
  remove(list_of(page), index);
  if (page.state != PageState::kDiscarded) note(dirty ? MoveKind::kOut : MoveKind::kDrop, index);
  if (dirty) {
    moved.bytes_out += kPageBytes;
    if (disk_.on()) {
      page.state = PageState::kHost;
      --used_;
      write(index, space_.home(page.frame), true);
      return true;
    }
    hold_host(page);
    space_.copy_out(page.frame, index);
  }
  page.state = page.state == PageState::kDiscarded ? PageState::kVoid : PageState::kHost;
  page.read_only = false;
  if (then == Frame::kGiven) {
    give_frame(page.frame);
  } else {
    page.attached = true;
    append(unused_, index);
  }
  return true;
}

bool Pager::map_remote(std::size_t index) {
  if (!space_.map_host(index)) return false;
  hold_host(pages_[index]);
  pages_[index].state = PageState::kHost;
  ++pages_[index].arrivals;
  return true;
}

bool Pager::unmap_remote(std::size_t index) {
  if (!space_.unmap_host(index)) return false;
  Page& page = pages_[index];
  if (std::exchange(page.thrashing, false)) remove(thrashing_, index);
  page.remote = false;
  page.windows = 0;
  return true;
}

bool Pager::to_device(Extent extent, Moved& moved) {
  for (std::size_t i = extent.first; i < extent.first + extent.count; ++i) {
    Page& page = pages_[i];
    page.last_prefetch = 0;
    page.leaves = false;
    if (page.pinned || page.windows > 0) continue;
    if (page.remote && !unmap_remote(i)) return false;
    switch (page.state) {
      case PageState::kVoid:
      case PageState::kHost:
        if (!bring(i, moved)) return false;
        break;
      case PageState::kDiscarded:  // a prefetch undoes the discard
        if (!make_writable(i)) return false;
        remove(discarded_, i);
        append(used_list_, i);
        break;
      case PageState::kDevice:
      case PageState::kDuplicate:  // no move, but the page counts as used now
        if (page.read_only && !page.on_disk && !make_writable(i)) return false;
        remove(used_list_, i);
        append(used_list_, i);
        break;
    }
  }
  return true;
}

bool Pager::to_host(Extent extent, Moved& moved) {
  for (std::size_t i = extent.first; i < extent.first + extent.count; ++i) {
    Page& page = pages_[i];
    page.last_prefetch = -1;
    if (page.pinned) continue;
    if (held(page)) {
      page.leaves = true;
      continue;
    }
    if (page.state != PageState::kVoid && page.state != PageState::kHost && !leave(i, moved))
      return false;
    if (page.state == PageState::kVoid) {
      if (disk_.on() && !space_.open_place(i)) return false;
      hold_host(page);
      page.state = PageState::kHost;
    }
  }
  return true;
}

// Copies a page of the device to the host, and keeps both.
bool Pager::duplicate(std::size_t index, Moved& moved) {
  Page& page = pages_[index];
  if (disk_.on()) {
    if (!disk_.writable() || !settle(index) || !space_.protect(index, PROT_READ)) return false;
    page.state = PageState::kDuplicate;
    page.read_only = false;
    if (page.on_disk) return true;
    moved.bytes_out += kPageBytes;
    note(MoveKind::kCopy, index);
    write_mapped(index);
    return true;
  }
  if (!space_.unmap_frame(page.frame, index, protection_of(page))) return false;
  hold_host(page);
  space_.copy_out(page.frame, index);
  moved.bytes_out += kPageBytes;
  note(MoveKind::kCopy, index);
  page.read_only = false;
  if (space_.map_frame(page.frame, index, PROT_READ)) {
    page.state = PageState::kDuplicate;
    return true;
  }
  remove(used_list_, index);
  page.state = PageState::kHost;
  give_frame(page.frame);
  return false;
}

bool Pager::prefetch_to_host(Extent extent, Moved& moved) {
  for (std::size_t i = extent.first; i < extent.first + extent.count; ++i) {
    Page& page = pages_[i];
    const bool there = page.state == PageState::kDevice || page.state == PageState::kDuplicate;
    if (!page.read_mostly || page.pinned || !there) {
      if (!to_host({i, 1}, moved)) return false;
      continue;
    }
    page.last_prefetch = -1;
    if (held(page)) continue;  // it remains on the device in any case
    if (page.state == PageState::kDevice && !duplicate(i, moved)) return false;
  }
  return true;
}

// Makes a page with a frame exclusive to the device.
bool Pager::make_writable(std::size_t index) {
  if (!settle(index)) return false;
  forget_copy(index);
  if (!space_.protect(index, kReadWrite)) return false;
  Page& page = pages_[index];
  if (page.state == PageState::kDiscarded) note(MoveKind::kFill, index);
  page.state = PageState::kDevice;
  page.read_only = false;
  ++page.arrivals;
  return true;
}

bool Pager::set_read_mostly(Extent extent, bool on) {
  Moved nothing;
  for (std::size_t i = extent.first; i < extent.first + extent.count; ++i) {
    Page& page = pages_[i];
    page.read_mostly = on;
    if (on || page.state != PageState::kDuplicate || page.in_source) continue;
    if (page.preferred != 0 && !held(page)) {
      if (!leave(i, nothing)) return false;
      continue;
    }
    if (!settle(i)) continue;  // it is on the disk alone
    page.state = PageState::kDevice;
    page.read_only = true;
    if (!uvm_ && !make_writable(i)) return false;
  }
  return true;
}

// The last page first: while a write that has begun is waited for, those after it must not begin.
void Pager::discard(Extent extent) {
  for (std::size_t i = extent.first + extent.count; i-- > extent.first;) {
    Page& page = pages_[i];
    if (page.pinned || page.windows > 0) continue;
    if (page.remote && !unmap_remote(i)) continue;
    if (page.arriving) drop_arriving(i);
    forget_copy(i);
    if (page.state == PageState::kHost) {
      page.state = PageState::kVoid;
      drop_host(i);  // still counted, as the driver keeps host memory until a free
    } else if (page.state == PageState::kDevice || page.state == PageState::kDuplicate) {
      if (poison_ && space_.protect(i, kReadWrite)) space_.fill(i, kPoison);
      // Unmapped, so that a write is seen and undoes the discard.
      if (!space_.protect(i, PROT_NONE)) continue;
      note(MoveKind::kDiscard, i);
      remove(used_list_, i);
      page.read_only = false;
      page.state = PageState::kDiscarded;
      append(discarded_, i);
    }
  }
}

Status Pager::place_in(Extent extent, const std::string& path, std::uint64_t offset,
                       std::size_t bytes) {
  if (!disk_.on()) return {Code::kNotSupported, "only with a disk do pages stay in a file"};
  for (std::size_t i = extent.first; i < extent.first + extent.count; ++i)
    if (pages_[i].pinned || pages_[i].windows > 0)
      return {Code::kBadState, "a system call is using the memory"};
  Result<std::uint16_t> source = disk_.open_source(path, offset + bytes);
  if (!source.ok()) return source.take_status();
  Status status = place_in(extent, source.value(), offset, bytes);
  disk_.close_source(source.value());
  return status;
}

Status Pager::place_in(Extent extent, std::uint16_t source, std::uint64_t offset,
                       std::size_t bytes) {
  discard(extent);
  Moved nothing;
  for (std::size_t i = extent.first; i < extent.first + extent.count; ++i) {
    Page& page = pages_[i];
    if (page.state == PageState::kDiscarded) evict(i, Frame::kGiven, nothing);
    if (page.state != PageState::kVoid)
      return {Code::kOutOfHostMemory, "the kernel refuses to take a page from the memory"};
    const std::size_t part = std::min(bytes, kPageBytes);
    disk_.place_in(i, source, offset, part);
    page.state = PageState::kHost;
    page.on_disk = page.in_source = true;
    hold_host(page);
    offset += part;
    bytes -= part;
  }
  return {};
}

bool Pager::pin_on_device(Extent extent, Moved& moved) {
  for (std::size_t i = extent.first; i < extent.first + extent.count; ++i) {
    if (!bring(i, moved)) return false;
    remove(used_list_, i);
    pages_[i].pinned = true;
    ++fixed_;
  }
  return true;
}

Pager::Fault Pager::fault(std::size_t index, bool writes, Moved& moved) {
  Page& page = pages_[index];
  const auto result = [](bool done) { return done ? Fault::kBrought : Fault::kRefused; };
  if (page.arriving && settle(index))
    return result(!writes || !page.read_only || make_writable(index));
  if (mapped_from_host(page) || (page.state == PageState::kDevice && !page.read_only))
    return Fault::kPresent;  // another thread's fault brought it meanwhile
  if (page.read_only || page.state == PageState::kDuplicate) {
    if (!writes) return Fault::kPresent;
    const bool clean = page.read_only && page.on_disk;
    const Fault done = result(make_writable(index));
    return clean && done == Fault::kBrought ? Fault::kWritable : done;
  }
  // Beside a disk, memory of the host would be in addition to the frames.
  const bool stays =
      !disk_.on() && (page.preferred == -1 || (page.accessed_by && page.state == PageState::kHost));
  if (stays && page.state != PageState::kDiscarded) {
    page.remote = map_remote(index);
    return result(page.remote);
  }
  if (thrashes(index)) return result(map_until_end(index));
  const std::int8_t last = page.last_prefetch;
  bool brought = false;  // a second time, with fewer frames, if writes fail meanwhile
  for (int i = 0; !brought && i < 2; ++i) {
    brought = to_device({index, 1}, moved) && settle(index);
    if (brought && writes && page.read_only) brought = make_writable(index);
  }
  page.last_prefetch = last;  // a fault is not a prefetch
  return result(brought);
}

// Counts a fault that needs contents from the host.
bool Pager::thrashes(std::size_t index) {
  Page& page = pages_[index];
  if (operation_ == 0 || page.state != PageState::kHost || disk_.on()) return false;
  if (std::exchange(page.operation, operation_) != operation_) page.fetches = 0;
  return ++page.fetches > kMaxFetches;
}

bool Pager::map_until_end(std::size_t index) {
  if (!map_remote(index)) return false;
  pages_[index].remote = pages_[index].thrashing = true;
  append(thrashing_, index);
  ++thrashed_;
  return true;
}

std::size_t Pager::end_operation() {
  ++operation_;
  // If the kernel refuses, the page remains mapped until it is moved.
  for (std::uint32_t id = thrashing_.head; id != 0;) {
    const std::size_t index = id - 1;
    id = pages_[index].next;
    if (pages_[index].windows == 0) {
      unmap_remote(index);
      continue;
    }
    // Until the system call returns.
    remove(thrashing_, index);
    pages_[index].remote = pages_[index].thrashing = false;
  }
  return std::exchange(thrashed_, 0);
}

// Beyond half of the frames, held pages leave before others, so that system calls cannot take the
// memory that everything else works in.
bool Pager::calls_hold_too_much() const {
  return 2 * fixed_ > frames_ || fixed_ + kMinFrames > frames_;
}

// Takes the frame from a held page. The call may be accessing its memory, so the memory remains in
// place and counts as the host's, and the frame gets new memory with its next contents.
bool Pager::hand_over(std::size_t index, Moved& moved) {
  Page& page = pages_[index];
  UMEM_ASSERT(held(page), "only a page that a system call accesses is handed over");
  if (!space_.open_frame(page.frame)) return false;
  if (!is_open(page, true) && !space_.protect(index, kReadWrite)) return false;
  remove(held_, index);
  --fixed_;
  forget_copy(index);
  hold_host(page);
  drop_host(index);  // an older copy
  if (page.state == PageState::kDevice) moved.bytes_out += kPageBytes;
  page.state = PageState::kHost;
  page.read_only = page.leaves = false;
  give_frame(page.frame);
  return true;
}

bool Pager::hold(std::size_t index, bool writes) {
  List& list = list_of(pages_[index]);
  if (!is_open(pages_[index], writes) && !make_writable(index)) return false;
  remove(list, index);
  append(held_, index);
  ++fixed_;
  return true;
}

// After the last window on a page that was held.
void Pager::let_go(std::size_t index, Moved& moved) {
  --fixed_;
  remove(held_, index);
  append(used_list_, index);
  // If the kernel refuses, the page remains on the device.
  if (std::exchange(pages_[index].leaves, false)) leave(index, moved);
}

bool Pager::open_on(std::size_t index, bool writes, Moved& moved) {
  const Page& page = pages_[index];
  if (mapped_from_host(page)) return true;
  if (held(page)) return is_open(page, writes) || make_writable(index);
  bool framed = page.state != PageState::kVoid && page.state != PageState::kHost;
  if (!framed && disk_.on()) framed = bring(index, moved);
  // Once more, if pages that kept their frames took all that its read waited for.
  if (!settle(index)) framed = bring(index, moved) && settle(index);
  if (!framed && page.on_disk) return false;
  return framed ? hold(index, writes) : map_remote(index);
}

bool Pager::open_window(Extent extent, bool writes, Moved& moved) {
  for (std::size_t i = extent.first; i < extent.first + extent.count; ++i) {
    if (pages_[i].pinned) continue;
    if (!open_on(i, writes, moved)) {
      close_window({extent.first, i - extent.first}, moved);
      return false;
    }
    ++pages_[i].windows;
  }
  return true;
}

void Pager::close_window(Extent extent, Moved& moved) {
  for (std::size_t i = extent.first; i < extent.first + extent.count; ++i) {
    Page& page = pages_[i];
    if (page.windows == 0 || --page.windows > 0 || page.remote) continue;
    if (page.state != PageState::kHost) {
      let_go(i, moved);
    } else if (unmap_remote(i)) {
      save_host(i);
    } else {
      page.remote = true;  // remains mapped from the host
    }
  }
}

void Pager::close_all_windows(Moved& moved) {
  for (const auto& [first, count] : allocations_) {
    for (std::size_t i = first; i < first + count; ++i) {
      pages_[i].windows = std::min<std::uint32_t>(pages_[i].windows, 1);
      close_window({i, 1}, moved);
    }
  }
}

// A frame that is set aside has no memory.
bool Pager::set_frames_of_disk(std::size_t frames, Moved& moved) {
  if (!shrink_to(frames, moved)) return false;
  const std::size_t wanted = frames + staging_;
  if (wanted > opened_ && !space_.open_frames(wanted)) return false;
  while (opened_ - set_aside_.size() < wanted) {
    auto frame = static_cast<std::uint32_t>(opened_);
    if (set_aside_.empty()) {
      ++opened_;
    } else {
      frame = set_aside_.back();
      set_aside_.pop_back();
    }
    disk_.give(frame);
  }
  while (opened_ - set_aside_.size() > wanted) {
    const std::uint32_t frame = disk_.take();
    if (frame == Disk::kNoFrame) break;  // those of pages that the disk did not take
    set_aside_.push_back(frame);
    space_.drop_frame(frame);
  }
  frames_ = frames;
  return true;
}

void Pager::reserve_frames(std::size_t frames) {
  free_frames_.reserve(std::min(frames, space_.pages()));
}

void Pager::give_back() {
  if (disk_.on()) return disk_.give_back();
  for (std::uint32_t frame : free_frames_) space_.drop_frame(frame);
}

bool Pager::set_frames(std::size_t frames, Moved& moved) {
  if (disk_.on()) return set_frames_of_disk(frames, moved);
  if (!space_.open_places(0, frames)) return false;
  reserve_frames(std::max(frames, opened_));
  if (!shrink_to(frames, moved)) return false;
  if (frames < frames_) give_back();
  frames_ = frames;
  return true;
}

}  // namespace umem::soft
