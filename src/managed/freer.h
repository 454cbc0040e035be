// Frees memory of a GPU on a thread of its own. cuMemFree waits for all work on the device, and a
// thread that frees a tensor may hold a resource that this work needs: a lock, the interpreter's
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
    std::size_t bytes = 0;    // bytes of the range
    std::uint64_t after = 0;  // for `ready`
  };
  // Called on the thread: `ready` waits until the moves up to a ticket are issued, which must not
  // come after the addresses are freed; `release` frees what the driver returned; `freed` receives
  // the bytes of each freed range.
  Freer(const driver::Table& table, driver::Place place, std::function<void(std::uint64_t)> ready,
        std::function<Status(std::uintptr_t)> release, std::function<void(std::size_t)> freed)
      : table_(table),
        place_(place),
        ready_(std::move(ready)),
        release_(std::move(release)),
        freed_(std::move(freed)) {}
  ~Freer();
  Freer(const Freer&) = delete;
  Freer& operator=(const Freer&) = delete;

  Status open();
  // Frees the remaining memory and waits for it. The thread goes on if some of it cannot be freed:
  // the driver refused it, or a graph is being captured.
  Status drain();
  // Ends the thread. Nothing is added to a drained freer that is closed.
  void close();

  // Memory that is added from now on is freed after the moves up to the ticket.
  void comes_after(std::uint64_t ticket);
  // Does not wait. Nothing is freed while a graph is captured.
  void add(std::uintptr_t raw, std::size_t bytes);
  // Waits until all added memory is freed, and retries refused frees. Returns at once while a graph
  // is captured, because its end may depend on the caller.
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
  const std::function<Status(std::uintptr_t)> release_;
  const std::function<void(std::size_t)> freed_;

  bool entered_ = false;  // used by the thread only

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::deque<Job> waiting_;
  std::vector<Job> refused_;
  Status refusal_;
  std::uint64_t after_ = 0, added_ = 0, done_ = 0, failures_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace umem::managed
