// The pager: the location of each 2 MiB page of managed memory, and the moves between frames and
// the host store. Eviction order is the driver's: free frames, unused ones, discarded pages, then
// used pages by their last allocation or migration (not by access). Pages that system calls access
// follow, as long as they leave half of the frames to others.
//
// With a disk, evicted pages live in its file instead of the host store, and moves continue in the
// background: a page that leaves keeps its frame until it is written, and one that comes is mapped
// when work needs it. A page that was read is mapped read-only, and leaves without a write until
// something writes it, which costs a page fault. Nothing is used in the host store then,
// whose memory would be in addition to the frames; only pages that system calls access while others
// need their frames are there.
//
// Not thread-safe: device.cpp's lock is held around every call. Only `allocate`, `free` and
// `set_frames` allocate memory, since the others also run inside the fault handler.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "soft/disk.h"
#include "soft/page_state.h"
#include "soft/space.h"

namespace umem::soft {

struct Page {
  PageState state = PageState::kVoid;
  bool allocated = false;
  bool pinned = false;       // plain device memory: never evicted
  bool host_backed = false;  // host memory is held, current or not
  bool read_mostly = false;
  bool accessed_by = false;
  bool remote = false;         // the host page is mapped at the managed address
  bool attached = false;       // no contents on the device, but a frame is kept (Options::uvm)
  bool read_only = false;      // a write faults once: see Options::uvm, or the disk has a copy
  bool leaves = false;         // sent to the host while held: it leaves when the last window closes
  bool thrashing = false;      // remote until the operation ends, since it faulted repeatedly
  bool on_disk = false;        // the disk has the contents, or is being given them
  bool in_source = false;      // the same, and they are in a source: nothing has written the page
  bool arriving = false;       // has a frame, and is mapped once the disk's contents are in it
  bool untouched = false;      // fetched from the host, and not accessed by a kernel since
  std::uint32_t windows = 0;   // parts of system calls that access the page now
  std::int8_t preferred = -2;  // CU_DEVICE_INVALID, CU_DEVICE_CPU or device 0
  std::int8_t last_prefetch = -2;
  std::uint32_t frame = 0;
  std::uint32_t arrivals = 0;   // how often it became accessible
  std::uint32_t operation = 0;  // in which it was last brought by a fault,
  std::uint32_t fetches = 0;    // and how often
  std::uint32_t work = 0;       // the host's work on the page: its number + 1; 0: none
  std::uint32_t prev = 0, next = 0;
  std::uint32_t ticket = 0, before = 0, after = 0;  // of an arriving page: its read, its neighbours
};

struct Moved {
  std::size_t bytes_in = 0;
  std::size_t bytes_out = 0;
};

class MoveLog;
enum class MoveKind : unsigned char;

class Pager {
 public:
  // `uvm`: as in Options.
  Status open(std::size_t frames, bool backed, bool uvm, const DiskOptions& disk);
  void close();

  struct Extent {
    std::size_t first = 0;
    std::size_t count = 0;
  };
  // Address space for managed pages; count 0 if none is left, or the kernel refused.
  Extent allocate(std::size_t pages);
  // False if the kernel refuses: the extent remains allocated.
  bool free(Extent extent);
  // The allocation that contains `address`; count 0 if none does.
  Extent find(std::uintptr_t address) const;
  bool empty() const { return allocations_.empty(); }

  // Each returns false if no frame is available or the kernel refuses; completed pages remain so.
  bool to_device(Extent extent, Moved& moved);
  bool to_host(Extent extent, Moved& moved);
  // Like to_host, but read-mostly pages remain on the device too: the host gets a copy.
  bool prefetch_to_host(Extent extent, Moved& moved);
  // Off: one copy of pages on both sides remains, on the preferred side. Without one the
  // documentation leaves the side open; here it is the host, which the fewest callers would expect.
  bool set_read_mostly(Extent extent, bool on);
  void discard(Extent extent);
  // The contents become `bytes` of the file, at `offset`; they are read when they are needed, and
  // the pages leave without a write until something writes them. kNotSupported without a disk,
  // kInvalidArgument if the file cannot be read, kBadState if pages cannot leave now: then nothing
  // has changed. After kOutOfHostMemory the contents are indeterminate.
  Status place_in(Extent extent, const std::string& path, std::uint64_t offset, std::size_t bytes);
  bool pin_on_device(Extent extent, Moved& moved);
  // Makes an allocated page accessible after a fault. `writes`: the access did.
  // kWritable: it was accessible, and the disk's copy of it is of no use from now on.
  enum class Fault { kBrought, kWritable, kPresent, kRefused };
  Fault fault(std::size_t page, bool writes, Moved& moved);
  // One operation of the program ends, and the next begins; returns the pages that it made thrash.
  // After the first call, a page that faults a third time in one operation is mapped from the host
  // until the operation ends: a few accesses that stride over more pages than there are frames
  // would otherwise fetch all pages repeatedly.
  std::size_t end_operation();
  // True if a kernel's access would not fault.
  bool accessible(std::size_t index, bool write) const {
    const Page& page = pages_[index];
    if (mapped_from_host(page)) return true;
    if (page.state == PageState::kDevice) return !write || !page.read_only;
    return page.state == PageState::kDuplicate && !write;
  }
  // During a system call the pages are accessible and remain in the same memory: a disk may have
  // been told to write there. Pages on the device keep their frames until others need them; all
  // others are mapped from the host, so that nothing moves. `writes`: to the pages.
  bool open_window(Extent extent, bool writes, Moved& moved);
  void close_window(Extent extent, Moved& moved);
  // As if all calls had returned: in a forked child their threads do not exist.
  void close_all_windows(Moved& moved);

  // Takes the frame of a page that is not pinned, as if no other were available. False if held.
  bool take_from(std::size_t index, Moved& moved);
  bool set_frames(std::size_t frames, Moved& moved);
  // Free frames have no memory until they are used again.
  void give_back();
  void set_poison(bool on) { poison_ = on; }
  void set_log(MoveLog* log) { log_ = log; }
  // Notes what is on the device.
  void note_held();
  void touched(std::size_t index) { pages_[index].untouched = false; }

  // Pages come from a disk while the program runs. `arrive` waits for those that were asked for
  // until a ticket was the last, and maps them, so that work after it does not fault.
  std::uint32_t last_ticket() const { return last_ticket_; }
  void arrive(std::uint32_t ticket);
  Disk& disk() { return disk_; }

  Page& page(std::size_t index) { return pages_[index]; }
  const Space& space() const { return space_; }
  std::size_t frames() const { return frames_; }
  std::size_t used_frames() const { return used_; }
  // Frames of pages that keep them, unless a system call releases one.
  std::size_t fixed_frames() const { return fixed_; }
  std::size_t peak_frames() const { return peak_; }
  // Frames that hold contents: discarded pages keep theirs until one is needed.
  std::size_t held_frames() const { return used_ - discarded_.pages - unused_.pages; }
  void reset_peak() {
    peak_ = held_frames();
    peak_host_pages_ = host_pages_;
  }
  std::size_t host_bytes() const { return host_pages_ << kPageShift; }
  std::size_t peak_host_bytes() const { return peak_host_pages_ << kPageShift; }

 private:
  struct List {
    std::uint32_t head = 0, tail = 0;  // page index + 1; 0 is none
    std::size_t pages = 0;
  };
  static bool mapped_from_host(const Page& page) {
    return page.remote || (page.windows > 0 && page.state == PageState::kHost);
  }
  // Accessed by a system call in its frame.
  static bool held(const Page& page) { return page.windows > 0 && !mapped_from_host(page); }
  void append(List& list, std::size_t index);
  void remove(List& list, std::size_t index);
  List& list_of(const Page& page) {
    if (held(page)) return held_;
    if (page.attached) return unused_;
    return page.state == PageState::kDiscarded ? discarded_ : used_list_;
  }

  // Evicts in the driver's order until at most `frames` are used.
  bool shrink_to(std::size_t frames, Moved& moved);
  bool free_a_frame(Moved& moved);
  std::size_t usable_frames();
  bool take_frame(std::uint32_t& frame, Moved& moved);
  bool frame_for(std::size_t index, std::uint32_t& frame, Moved& moved);
  void give_frame(std::uint32_t frame);
  bool bring(std::size_t index, Moved& moved);
  bool read(std::size_t index, Moved& moved);
  bool settle(std::size_t index);
  void end_arrival(std::size_t index);
  void drop_arriving(std::size_t index);
  void write(std::size_t index, const char* from, bool gives);
  void write_mapped(std::size_t index);
  void forget_copy(std::size_t index);
  void save_host(std::size_t index);
  bool set_frames_of_disk(std::size_t frames, Moved& moved);
  void reserve_frames(std::size_t frames);  // the list of free ones never grows
  enum class Frame { kKept, kGiven };
  bool evict(std::size_t index, Frame then, Moved& moved);
  bool leave(std::size_t index, Moved& moved) {
    return evict(index, uvm_ ? Frame::kKept : Frame::kGiven, moved);
  }
  void detach(std::size_t index);
  bool duplicate(std::size_t index, Moved& moved);
  bool make_writable(std::size_t index);
  bool hold(std::size_t index, bool writes);
  void let_go(std::size_t index, Moved& moved);
  Status place_in(Extent extent, std::uint16_t source, std::uint64_t offset, std::size_t bytes);
  bool calls_hold_too_much() const;
  bool hand_over(std::size_t index, Moved& moved);
  bool open_on(std::size_t index, bool writes, Moved& moved);
  bool release_page(std::size_t index);
  bool map_remote(std::size_t index);
  bool unmap_remote(std::size_t index);
  void hold_host(Page& page);
  void drop_host(std::size_t index);
  bool thrashes(std::size_t index);
  bool map_until_end(std::size_t index);
  void note(MoveKind kind, std::size_t index);

  Space space_;
  Disk disk_;
  std::size_t staging_ = 0;               // frames beyond `frames_`, for pages under way
  std::vector<std::uint32_t> set_aside_;  // frames of a larger device
  std::uint32_t last_ticket_ = 0;
  std::uint32_t first_arriving_ = 0, last_arriving_ = 0;  // page index + 1, in order of tickets
  Page* pages_ = nullptr;
  std::map<std::size_t, std::size_t> allocations_, free_space_;  // first page -> count
  std::vector<std::uint32_t> free_frames_;
  std::size_t frames_ = 0, opened_ = 0, used_ = 0, peak_ = 0;
  std::size_t host_pages_ = 0, peak_host_pages_ = 0;
  std::size_t fixed_ = 0;  // frames that are pinned or held
  List used_list_, discarded_, unused_, held_, thrashing_;
  std::uint32_t operation_ = 0;  // its number; 0: operations are not marked
  std::size_t thrashed_ = 0;     // pages, in this operation
  bool poison_ = false, uvm_ = false;
  MoveLog* log_ = nullptr;
};

}  // namespace umem::soft
