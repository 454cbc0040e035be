#include "engine/watchdog.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "base/thread.h"

namespace umem::engine {
namespace {

constexpr double kAgain = 10;  // the message is repeated after this factor of time
// Seconds between checks, after which a new patience takes effect.
constexpr double kShortest = 0.001, kLongest = 5;

std::int64_t steady_ns() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

}  // namespace

Watchdog& Watchdog::the() {
  static Watchdog* const watchdog = new Watchdog;
  return *watchdog;
}

Status Watchdog::watch(int device, WatchedCalls*& calls) {
  const std::lock_guard alone(lifetime_);
  if (!thread_.joinable()) {
    ending_ = false;
    UMEM_RETURN_IF_ERROR(start_thread(thread_, "watches driver calls", [this] { run(); }));
  }
  const std::lock_guard guard(mutex_);
  calls = &watched_.emplace_back(device);
  return {};
}

void Watchdog::forget(WatchedCalls* calls) {
  if (!calls) return;
  const std::lock_guard alone(lifetime_);
  {
    const std::lock_guard guard(mutex_);
    watched_.remove_if([&](const WatchedCalls& one) { return &one == calls; });
    ending_ = watched_.empty();
    if (!ending_) return;
  }
  ended_.notify_all();
  thread_.join();
}

void Watchdog::run() {
  std::unique_lock guard(mutex_);
  while (!ending_) {
    const double patience = patience_;
    const double wait = patience > 0 ? std::clamp(patience / 4, kShortest, kLongest) : kLongest;
    ended_.wait_for(guard, std::chrono::duration<double>(wait));
    if (patience <= 0) continue;
    std::string text;
    for (WatchedCalls& calls : watched_) text += look(calls, patience);
    if (text.empty()) continue;
    guard.unlock();  // stderr may be a pipe without a reader
    std::fputs(text.c_str(), stderr);
    guard.lock();
  }
}

// The message, or empty.
std::string Watchdog::look(WatchedCalls& calls, double patience) {
  const std::int64_t since = calls.since_ns;
  if (since != calls.seen_ns) calls.say_after = patience;
  calls.seen_ns = since;
  const double seconds = since == 0 ? 0 : static_cast<double>(steady_ns() - since) / 1e9;
  if (since == 0 || seconds < calls.say_after) return {};
  calls.say_after = seconds * kAgain;
  char text[400];
  std::snprintf(
      text, sizeof text,
      "umem: warning: device %d: the driver's call to %s has not returned for %.3g s, and "
      "the program waits where it needs that memory. The call may wait for work before "
      "it: look for a kernel that does not end, or a callback on the host that waits for "
      "this program\n",
      calls.device, calls.what.load(), seconds);
  return text;
}

Watchdog::Call::Call(WatchedCalls* calls, const char* what) : calls_(calls) {
  if (!calls_) return;
  calls_->what = what;
  calls_->since_ns = steady_ns();
}

Watchdog::Call::~Call() {
  if (calls_) calls_->since_ns = 0;
}

}  // namespace umem::engine
