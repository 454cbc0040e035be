// The transfers between frames and the file of evicted pages, on threads of their own, and the
// frames, which a transfer may hold while the program runs.
//
// A frame that is being written is given back once the page is on disk, so evictions need frames
// beyond the device's (`staging`). A page that is wanted while its write waits never leaves its
// frame. A read may wait for a frame that others give back. Reads that the program waits for
// overtake.
//
// Callers hold the device's lock, which the threads never take. A forked child has no such threads:
// it transfers at once, in the caller.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "driver/table.h"
#include "soft/disk_file.h"
#include "soft/space.h"

namespace umem::soft {

struct DiskOptions {
  std::string folder;           // empty: no disk
  std::size_t limit_bytes = 0;  // of the file; 0: none
  std::size_t staging = 0;      // frames
};

class Disk {
 public:
  static constexpr std::uint32_t kNoFrame = ~0U;

  Disk() = default;
  ~Disk() { close(); }
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  Status open(const DiskOptions& options, const Space& space);
  void close();
  bool on() const { return io_ != nullptr; }

  bool reserve(std::size_t pages);
  void release(std::size_t pages);

  std::uint32_t take();  // waits for a free frame; kNoFrame if none becomes free
  void give(std::uint32_t frame);
  // Waits for the writes, and takes the memory from free frames.
  void give_back();

  // False if the disk takes no more: nothing may be evicted that it has not. One that is full of
  // what children may still read takes more once they have ended.
  bool writable();
  // Frames that pages keep because they could not be written.
  std::size_t stuck() const { return stuck_; }
  bool has_frame(std::size_t page) const;  // its last write is not over
  // From `from`, where nothing may write meanwhile. `gives`: the frame is free afterwards.
  void write(std::size_t page, std::uint32_t frame, const char* from, bool gives);
  // To a frame that is free when the read begins.
  void read(std::size_t page);
  // Ends the page's last write, which may wait, run or have failed: the page keeps its frame unless
  // the write was over.
  struct Kept {
    bool frame, on_disk;
  };
  Kept keep(std::size_t page, std::uint32_t& frame);
  // Waits for the page's read. False if it failed; the frame is the caller's in any case, or
  // kNoFrame if none became free.
  bool await(std::size_t page, std::uint32_t& frame);
  // Ends the page's read, and returns its frame or kNoFrame.
  std::uint32_t drop(std::size_t page);
  // Opens a file that has contents of pages, up to byte `bytes` of it; the number is valid until
  // `close_source` and while pages are placed in it.
  Result<std::uint16_t> open_source(const std::string& path, std::uint64_t bytes);
  void close_source(std::uint16_t source);
  // The page's contents are `bytes` of a source from now on. It must have no transfer.
  void place_in(std::size_t page, std::uint16_t source, std::uint64_t offset, std::size_t bytes);
  // Writes from memory that is no frame. False if that failed.
  bool write_from(std::size_t page, const char* from);
  // The page's contents on disk are of no use. It must not be leaving.
  void forget(std::size_t page);

  void prepare_fork();
  void forked_parent() { file_.forked_parent(); }
  void forked_child();

  driver::DiskCounters counters() const;
  // Copies why and where the last transfer failed. False if it did not.
  bool describe_failure(char* text, std::size_t size) const;

 private:
  enum class State : unsigned char {
    kIdle,
    kWriteWaits,
    kWriting,
    kReadWaits,
    kReading,
    kRead,
    kUnread,
    kUnwritten
  };
  struct Io {  // of a page; all zeros at first
    Slot slot;
    State state;
    bool gives;
    std::uint32_t frame;
    std::uint32_t prev, next;  // page + 1
    const char* from;
  };
  struct Queue {
    std::uint32_t head = 0, tail = 0;  // page + 1
  };
  struct Workers {
    std::mutex mutex;
    std::condition_variable for_reads, for_writes, changed;
    std::vector<std::thread> threads;
    bool stopping = false;
  };
  struct Busy {
    std::size_t running = 0;
    std::uint64_t since_us = 0, total_us = 0, bytes = 0;
  };

  std::unique_lock<std::mutex> guard() const;
  template <class Done>
  void wait_until(std::unique_lock<std::mutex>& lock, Done done);
  void push(Queue& queue, std::size_t page, bool first);
  void unlink(Queue& queue, std::size_t page);
  void work(bool writes);
  void transfer(std::size_t page, bool writes, std::unique_lock<std::mutex>& lock);
  int write_page(Io& io, const char* from, std::unique_lock<std::mutex>& lock);
  int read_page(std::size_t page, char* to, std::unique_lock<std::mutex>& lock);
  void give_locked(std::uint32_t frame);
  std::uint32_t pop_free();
  // No frame becomes free by itself: those of failed writes stay with their pages.
  bool is_starved() const { return free_.empty() && writes_.head == 0 && out_.running == 0; }
  void write_again(std::unique_lock<std::mutex>& lock);
  void note_failure(bool write, int error, const Slot& slot);
  void forget_failure(std::size_t page);
  void break_off(std::unique_lock<std::mutex>& lock);
  void warn(std::unique_lock<std::mutex>& lock);
  void begin(Busy& busy);
  void end(Busy& busy);

  DiskFile file_;
  const Space* space_ = nullptr;
  Io* io_ = nullptr;
  std::size_t pages_ = 0;
  std::vector<std::uint32_t> free_;  // frames; with room for all
  std::size_t takers_ = 0;           // threads that wait in `take`
  Queue reads_, writes_;
  Queue unwritten_;  // pages whose frames are stuck
  Busy in_, out_;
  std::uint64_t wait_us_ = 0, opened_us_ = 0;
  std::atomic<bool> broken_{false};
  std::atomic<bool> full_{false};  // broken for that reason
  std::atomic<std::size_t> stuck_{0};
  std::array<char, 256> failure_{};
  std::size_t unread_ = 0;      // the page whose read failed last
  Workers* workers_ = nullptr;  // null in a forked child
};

}  // namespace umem::soft
