// Frees memory of a GPU on a thread of its own. cuMemFree waits for all that the device was given,
// and a thread that frees a tensor may hold what that work needs to end: a lock, the interpreter's
// lock, the next launch on another device.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/status.h"
#include "driver/place.h"
#include "driver/table.h"

namespace umem::managed {

class Freer {
 public:
  struct Job {
    std::uintptr_t raw = 0;   // what the driver returned
    std::size_t bytes = 0;    // of the range
    std::uint64_t after = 0;  // for `ready`
  };
  // On the thread: `ready` waits until the driver was given the moves up to a ticket, which must
  // not come after the addresses have gone; `freed` is told of the bytes of each range that went.
  Freer(const driver::Table& table, driver::Place place, std::function<void(std::uint64_t)> ready,
        std::function<void(std::size_t)> freed)
      : table_(table), place_(place), ready_(std::move(ready)), freed_(std::move(freed)) {}
  ~Freer();
  Freer(const Freer&) = delete;
  Freer& operator=(const Freer&) = delete;

  void open();
  // Frees what is left, waits for it and ends the thread; the driver's reason where it refused.
  Status close();

  // What is added from now on is freed after the moves up to the ticket.
  void comes_after(std::uint64_t ticket);
  // Returns at once. Nothing is freed while a graph is captured.
  void add(std::uintptr_t raw, std::size_t bytes);
  // Waits until all that was added is freed; what the driver refused before is asked for again.
  // Returns at once while a graph is captured, since its end may be up to the caller.
  Status wait();
  std::uint64_t failures();

 private:
  bool captured() const { return place_.captures && *place_.captures > 0; }
  Status enter_context();
  Status free(const Job& job);
  void work();

  const driver::Table& table_;
  const driver::Place place_;
  const std::function<void(std::uint64_t)> ready_;
  const std::function<void(std::size_t)> freed_;

  bool entered_ = false;  // of the thread alone

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::deque<Job> waiting_;
  std::vector<Job> refused_;
  Status refusal_;
  std::uint64_t after_ = 0, added_ = 0, done_ = 0, failures_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace umem::managed
