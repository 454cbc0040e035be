// Reports driver calls that move memory and do not return: which call, and for how long. It takes
// no lock that the thread of such a call may hold.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <string>
#include <thread>

#include "base/status.h"

namespace umem::engine {

// The calls of one lane, which come one at a time.
struct WatchedCalls {
  explicit WatchedCalls(int ordinal) : device(ordinal) {}
  const int device;
  std::atomic<const char*> what{nullptr};
  std::atomic<std::int64_t> since_ns{0};  // 0: in no call
  // Used by the watchdog only: the call that it checked last.
  std::int64_t seen_ns = 0;
  double say_after = 0;  // seconds
};

// One object, never destroyed. Its thread runs while there is something to watch.
class Watchdog {
 public:
  static Watchdog& the();

  // Takes effect within seconds; 0: no reports.
  void set_patience(double seconds) { patience_ = seconds; }
  // Sets `calls`, which `forget` ends.
  Status watch(int device, WatchedCalls*& calls);
  void forget(WatchedCalls* calls);

  // Its lifetime is that of a call. Null: not watched.
  class Call {
   public:
    Call(WatchedCalls* calls, const char* what);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    WatchedCalls* const calls_;
  };

 private:
  Watchdog() = default;
  void run();
  static std::string look(WatchedCalls& calls, double patience);

  std::atomic<double> patience_{0};
  std::mutex lifetime_;  // guards the thread; taken before the other
  std::thread thread_;
  std::mutex mutex_;  // guards the members below, and is held only for moments
  std::condition_variable ended_;
  bool ending_ = false;
  std::list<WatchedCalls> watched_;
};

}  // namespace umem::engine
