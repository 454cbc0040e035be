// Times of ops on a GPU, from pairs of events on their streams. They are read once complete:
// nothing waits for them while the program runs. Not thread-safe except for `wait`.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "driver/place.h"
#include "driver/table.h"

namespace umem::trace {

inline constexpr int kNoTimer = -1;

class Timers {
 public:
  Timers(const driver::Table& table, driver::Place place) : table_(table), place_(place) {}
  ~Timers();
  Timers(const Timers&) = delete;
  Timers& operator=(const Timers&) = delete;

  const driver::Place& place() const { return place_; }
  // kNoTimer while a graph is captured, when all pairs are in flight, or where the driver refuses.
  int start(cu::CUstream stream);
  static constexpr std::uint64_t kNoEvent = 0;
  // The op ended, and is that event, or none. `parent`: the timer of the op that it ran in.
  void stop(int timer, cu::CUstream stream, std::uint64_t event, int parent);
  // The op that ended last is not recorded after all: its number will be reused.
  void disown(std::uint64_t event);
  // All pairs are in flight, for all that is known.
  bool full() const { return free_.empty() && pairs_.size() == kMax; }
  // Something inside the op is not timed, so that its own part of the time is not known.
  void spoil(int timer);

  // Calls `found` with every event that is done and its own time, in the order of their ends, up to
  // the first that is not done. A time below 0 is not known.
  void resolve(const std::function<void(std::uint64_t event, float us)>& found);
  // Ended ops that are not known to be complete.
  std::vector<cu::CUevent> ended() const;
  // Waits for these. Needs no lock.
  void wait(const std::vector<cu::CUevent>& events) const;
  // Number of the first event that is still open, or `none`.
  std::uint64_t first_open(std::uint64_t none) const;

 private:
  static constexpr std::size_t kMax = 4096;

  struct Pair {
    cu::CUevent begin = nullptr, end = nullptr;
    std::uint64_t event = 0;
    int parent = kNoTimer;
    std::uint64_t parent_use = 0;
    std::uint64_t use = 0;  // distinguishes the ops that used the pair
    float nested_us = 0;
    bool spoilt = false;
  };

  int take();
  void release(int timer);

  const driver::Table& table_;
  driver::Place place_;
  std::vector<Pair> pairs_;
  std::vector<int> free_;
  std::deque<int> ended_;  // by their ends
  std::uint64_t uses_ = 0;
};

}  // namespace umem::trace
