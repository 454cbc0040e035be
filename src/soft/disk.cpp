#include "soft/disk.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <exception>
#include <utility>

#include "base/assert.h"

namespace umem::soft {
namespace {

constexpr int kThreads = 2;  // each way: more in flight is no faster on any disk measured

std::uint64_t real_us() {
  using std::chrono::microseconds;
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::duration_cast<microseconds>(since).count());
}

}  // namespace

Status Disk::open(const DiskOptions& options, const Space& space) {
  UMEM_RETURN_IF_ERROR(
      file_.open(options.folder, options.limit_bytes >> kPageShift, space.pages()));
  pages_ = space.pages();
  opened_us_ = real_us();
  void* table = mmap(nullptr, pages_ * sizeof(Io), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (table == MAP_FAILED) {
    file_.close();
    return {Code::kOutOfHostMemory, "no memory for the table of pages on disk"};
  }
  io_ = static_cast<Io*>(table);
  space_ = &space;
  workers_ = new Workers;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // the program's handlers run on its own threads
  Status status;
  try {
    free_.reserve(pages_);
    for (int i = 0; i < 2 * kThreads; ++i)
      workers_->threads.emplace_back([this, i] { work(i % 2 == 0); });
  } catch (const std::exception& error) {
    status = {Code::kOutOfHostMemory,
              std::string("cannot start the threads that write to the disk: ") + error.what()};
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!status.ok()) close();
  return status;
}

void Disk::close() {
  if (!on()) return;
  if (workers_) {
    {
      auto lock = guard();
      wait_until(lock, [&] { return writes_.head == 0 && in_.running + out_.running == 0; });
      workers_->stopping = true;
    }
    workers_->for_reads.notify_all();
    workers_->for_writes.notify_all();
    for (std::thread& thread : workers_->threads) thread.join();
    delete workers_;
    workers_ = nullptr;
  }
  munmap(std::exchange(io_, nullptr), pages_ * sizeof(Io));
  file_.close();
}

std::unique_lock<std::mutex> Disk::guard() const {
  return workers_ ? std::unique_lock(workers_->mutex) : std::unique_lock<std::mutex>();
}

// Without threads all is done before anyone can wait for it.
template <class Done>
void Disk::wait_until(std::unique_lock<std::mutex>& lock, Done done) {
  if (done()) return;
  UMEM_ASSERT(workers_ != nullptr, "without threads, a transfer is over when its call returns");
  const std::uint64_t begin = real_us();
  workers_->changed.wait(lock, done);
  wait_us_ += real_us() - begin;
}

bool Disk::writable() {
  if (!broken_) return true;
  if (!full_) return false;
  auto lock = guard();
  if (!file_.has_room()) return false;
  full_ = broken_ = false;
  failure_[0] = '\0';
  write_again(lock);
  return !broken_;
}

void Disk::write_again(std::unique_lock<std::mutex>& lock) {
  while (unwritten_.head != 0 && !broken_) {
    const std::size_t page = unwritten_.head - 1;
    unlink(unwritten_, page);
    --stuck_;
    if (!workers_) {
      transfer(page, true, lock);
      continue;
    }
    io_[page].state = State::kWriteWaits;
    push(writes_, page, false);
    workers_->for_writes.notify_one();
  }
}

bool Disk::has_frame(std::size_t page) const {
  const auto lock = guard();
  const State state = io_[page].state;
  return state == State::kWriteWaits || state == State::kWriting || state == State::kUnwritten;
}

bool Disk::reserve(std::size_t pages) {
  const auto lock = guard();
  return file_.reserve(pages);
}

void Disk::release(std::size_t pages) {
  const auto lock = guard();
  file_.release(pages);
}

void Disk::push(Queue& queue, std::size_t page, bool first) {
  const auto id = static_cast<std::uint32_t>(page + 1);
  Io& io = io_[page];
  io.prev = first ? 0 : queue.tail;
  io.next = first ? queue.head : 0;
  (io.prev ? io_[io.prev - 1].next : queue.head) = id;
  (io.next ? io_[io.next - 1].prev : queue.tail) = id;
}

void Disk::unlink(Queue& queue, std::size_t page) {
  Io& io = io_[page];
  (io.prev ? io_[io.prev - 1].next : queue.head) = io.next;
  (io.next ? io_[io.next - 1].prev : queue.tail) = io.prev;
  io.prev = io.next = 0;
}

void Disk::begin(Busy& busy) {
  if (busy.running++ == 0) busy.since_us = real_us();
}

void Disk::end(Busy& busy) {
  if (--busy.running == 0) busy.total_us += real_us() - busy.since_us;
  busy.bytes += kPageBytes;
}

void Disk::note_failure(bool write, int error, const Slot& slot) {
  const bool source = slot.in_source();
  const std::uint64_t offset = source             ? slot.sum
                               : slot.number == 0 ? 0
                                                  : std::uint64_t{slot.number - 1} << kPageShift;
  char at[40] = "its end";
  if (slot.number != 0)
    std::snprintf(at, sizeof at, "offset %llu", static_cast<unsigned long long>(offset));
  char number[24];
  std::snprintf(number, sizeof number, "error %d", error);
  const char* const why = error == kDamaged   ? "these are not the bytes that were written"
                          : error == kChanged ? "it was changed after it was loaded"
                          : error == EIO      ? "input/output error"
                          : error == EBADF    ? "the program has closed its descriptor"
                          : error != ENOSPC   ? number
                          : full_             ? "no space is left on the disk; children that the "
                                                "program forked may read what it has"
                                              : "no space is left on the disk";
  const std::string& name = source ? file_.sources().path(slot.source()) : file_.folder();
  std::snprintf(failure_.data(), failure_.size(), "%s %s'%s' at %s: %s",
                write ? "writing" : "reading", source ? "" : "the file in ", name.c_str(), at, why);
}

// A place that fails may be a bad block, so another one is tried.
int Disk::write_page(Io& io, const char* from, std::unique_lock<std::mutex>& lock) {
  int error = 0;
  Slot slot;
  for (int i = 0; i < 2; ++i) {
    slot = io.slot;
    if (!file_.take(slot)) {
      full_ = file_.is_shared();
      note_failure(true, ENOSPC, io.slot.in_source() ? Slot{} : io.slot);
      return ENOSPC;
    }
    if (lock.owns_lock()) lock.unlock();
    error = file_.write(slot, from);
    if (lock.mutex()) lock.lock();
    io.slot = slot;
    if (error == 0) return 0;
    io.slot = {};  // never used again
  }
  full_ = false;
  note_failure(true, error, slot);
  return error;
}

int Disk::read_page(std::size_t page, char* to, std::unique_lock<std::mutex>& lock) {
  const Slot slot = io_[page].slot;
  if (lock.owns_lock()) lock.unlock();
  const int error = file_.read(slot, to);
  if (lock.mutex()) lock.lock();
  if (error != 0) {
    note_failure(false, error, slot);
    unread_ = page;
  } else {
    forget_failure(page);
  }
  return error;
}

// After a read that succeeded at last, or whose contents are not needed now.
void Disk::forget_failure(std::size_t page) {
  if (!broken_ && unread_ == page) failure_[0] = '\0';
}

// With the page in no queue.
void Disk::transfer(std::size_t page, bool writes, std::unique_lock<std::mutex>& lock) {
  Io& io = io_[page];
  if (!writes) io.frame = pop_free();
  io.state = writes ? State::kWriting : State::kReading;
  Busy& busy = writes ? out_ : in_;
  begin(busy);
  const int error =
      writes ? write_page(io, io.from, lock) : read_page(page, space_->home(io.frame), lock);
  end(busy);
  if (!writes) {
    io.state = error == 0 ? State::kRead : State::kUnread;
  } else if (error == 0) {
    io.state = State::kIdle;
    if (io.gives) give_locked(io.frame);
  } else {
    io.state = State::kUnwritten;
    if (io.gives) {
      ++stuck_;
      push(unwritten_, page, false);
    }
    break_off(lock);
  }
  if (workers_) workers_->changed.notify_all();
}

// After a write that failed: nothing is evicted any more.
void Disk::break_off(std::unique_lock<std::mutex>& lock) {
  if (!broken_.exchange(true)) warn(lock);
}

// Not by stdio, whose lock a thread may hold that waits for this transfer.
void Disk::warn(std::unique_lock<std::mutex>& lock) {
  char line[400];
  const int n = std::snprintf(line, sizeof line,
                              "umem: warning: %s. Nothing is lost: what is not on the disk stays "
                              "in memory, and no more is evicted\n",
                              failure_.data());
  if (lock.owns_lock()) lock.unlock();
  [[maybe_unused]] const long written = syscall(
      SYS_write, STDERR_FILENO, line, std::min(static_cast<std::size_t>(n), sizeof line - 1));
  if (lock.mutex()) lock.lock();
}

void Disk::work(bool writes) {
  Workers& workers = *workers_;
  std::unique_lock lock(workers.mutex);
  Queue& queue = writes ? writes_ : reads_;
  const auto ready = [&] { return queue.head != 0 && (writes || free_.size() > takers_); };
  while (true) {
    (writes ? workers.for_writes : workers.for_reads).wait(lock, [&] {
      return workers.stopping || ready();
    });
    if (workers.stopping) return;
    const std::size_t page = queue.head - 1;
    unlink(queue, page);
    transfer(page, writes, lock);
  }
}

std::uint32_t Disk::pop_free() {
  const std::uint32_t frame = free_.back();
  free_.pop_back();
  return frame;
}

void Disk::give_locked(std::uint32_t frame) {
  UMEM_ASSERT(free_.size() < free_.capacity(), "the fault handler allocates no memory");
  free_.push_back(frame);
  if (!workers_) return;
  if (takers_ > 0) workers_->changed.notify_all();
  if (reads_.head) workers_->for_reads.notify_one();
}

void Disk::give(std::uint32_t frame) {
  const auto lock = guard();
  give_locked(frame);
}

void Disk::give_back() {
  auto lock = guard();
  wait_until(lock, [&] { return writes_.head == 0 && out_.running == 0; });
  for (std::uint32_t frame : free_) space_->drop_frame(frame);
}

std::uint32_t Disk::take() {
  auto lock = guard();
  ++takers_;
  wait_until(lock, [&] { return !free_.empty() || is_starved(); });
  --takers_;
  if (free_.empty()) return kNoFrame;
  const std::uint32_t frame = pop_free();
  if (workers_ && reads_.head) workers_->for_reads.notify_one();
  return frame;
}

void Disk::write(std::size_t page, std::uint32_t frame, const char* from, bool gives) {
  auto lock = guard();
  Io& io = io_[page];
  UMEM_ASSERT(io.state == State::kIdle, "a page has one transfer");
  io.frame = frame;
  io.from = from;
  io.gives = gives;
  io.state = State::kWriteWaits;
  if (!workers_) return transfer(page, true, lock);
  push(writes_, page, false);
  workers_->for_writes.notify_one();
}

void Disk::read(std::size_t page) {
  auto lock = guard();
  Io& io = io_[page];
  UMEM_ASSERT(io.state == State::kIdle && io.slot.number != 0, "a page that is read is on disk");
  io.frame = kNoFrame;
  io.state = State::kReadWaits;
  push(reads_, page, false);
  if (workers_) workers_->for_reads.notify_one();
}

Disk::Kept Disk::keep(std::size_t page, std::uint32_t& frame) {
  auto lock = guard();
  Io& io = io_[page];
  if (io.state == State::kIdle) return {false, true};
  if (io.state == State::kUnwritten && io.gives) {
    unlink(unwritten_, page);
    --stuck_;
  }
  if (io.state == State::kWriteWaits) {
    unlink(writes_, page);
    io.state = State::kUnwritten;
  }
  io.gives = false;
  wait_until(lock, [&] { return io.state != State::kWriting; });
  frame = io.frame;
  return {true, std::exchange(io.state, State::kIdle) == State::kIdle};
}

bool Disk::await(std::size_t page, std::uint32_t& frame) {
  auto lock = guard();
  Io& io = io_[page];
  if (io.state == State::kReadWaits) {
    unlink(reads_, page);
    push(reads_, page, true);
    if (workers_) workers_->for_reads.notify_one();
  }
  const auto waits_in_vain = [&] { return io.state == State::kReadWaits && is_starved(); };
  if (!workers_ && io.state == State::kReadWaits && !waits_in_vain()) {
    unlink(reads_, page);
    transfer(page, false, lock);
  }
  wait_until(lock, [&] {
    return io.state == State::kRead || io.state == State::kUnread || waits_in_vain();
  });
  frame = io.frame;
  if (io.state == State::kReadWaits) {
    unlink(reads_, page);
    io.state = State::kIdle;
    return false;
  }
  // An error may pass, and what cannot be read ends the process.
  bool done = io.state == State::kRead;
  for (int i = 0; !done && i < 3; ++i) done = read_page(page, space_->home(frame), lock) == 0;
  io.state = State::kIdle;
  return done;
}

std::uint32_t Disk::drop(std::size_t page) {
  auto lock = guard();
  Io& io = io_[page];
  if (io.state == State::kReadWaits) unlink(reads_, page);
  wait_until(lock, [&] { return io.state != State::kReading; });
  if (io.state == State::kUnread) forget_failure(page);
  io.state = State::kIdle;
  return io.frame;
}

Result<std::uint16_t> Disk::open_source(const std::string& path, std::uint64_t bytes) {
  const auto lock = guard();
  return file_.sources().open(path, bytes);
}

void Disk::close_source(std::uint16_t source) {
  const auto lock = guard();
  file_.sources().drop(source);
}

void Disk::place_in(std::size_t page, std::uint16_t source, std::uint64_t offset,
                    std::size_t bytes) {
  const auto lock = guard();
  Io& io = io_[page];
  UMEM_ASSERT(io.state == State::kIdle, "a page under way is not placed in a source");
  const Slot slot = file_.place_in(source, offset, bytes);  // first: it may be the same source
  file_.give(io.slot);
  io.slot = slot;
}

bool Disk::write_from(std::size_t page, const char* from) {
  auto lock = guard();
  begin(out_);
  const bool done = write_page(io_[page], from, lock) == 0;
  end(out_);
  if (!done) break_off(lock);
  return done;
}

void Disk::forget(std::size_t page) {
  const auto lock = guard();
  UMEM_ASSERT(io_[page].state == State::kIdle, "a page under way is not forgotten");
  file_.give(io_[page].slot);
}

void Disk::prepare_fork() {
  auto lock = guard();
  wait_until(lock, [&] {
    // A child has no threads: its reads are inherited, and made by those who wait for them.
    const bool reads_wait = workers_ && reads_.head != 0 && !is_starved();
    return writes_.head == 0 && in_.running + out_.running == 0 && !reads_wait;
  });
  file_.prepare_fork();
}

// The threads are the parent's, and what they share is left as it is: it may say that they wait.
void Disk::forked_child() {
  workers_ = nullptr;
  takers_ = 0;
  file_.forked_child();
}

bool Disk::describe_failure(char* text, std::size_t size) const {
  const auto lock = guard();
  std::snprintf(text, size, "%s", failure_.data());
  return failure_[0] != '\0';
}

driver::DiskCounters Disk::counters() const {
  const auto lock = guard();
  return {in_.bytes,    out_.bytes, in_.total_us, out_.total_us, wait_us_, real_us() - opened_us_,
          file_.bytes()};
}

}  // namespace umem::soft
