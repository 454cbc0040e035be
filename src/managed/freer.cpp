#include "managed/freer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/assert.h"
#include "base/thread.h"

namespace umem::managed {
namespace {

// The polling interval for the end of a capture, which sends no notification.
constexpr auto kPoll = std::chrono::milliseconds(1);

}  // namespace

// It is still open only while the process ends: no caller is left to join its thread.
Freer::~Freer() {
  if (thread_.joinable()) thread_.detach();
}

Status Freer::open() {
  entered_ = false;
  return start_thread(thread_, "frees memory", [this] { work(); });
}

Status Freer::drain() {
  UMEM_RETURN_IF_ERROR(wait());
  const std::lock_guard guard(mutex_);
  if (done_ == added_) return {};
  return {Code::kBadState, "memory cannot be freed while a graph is captured; end the capture"};
}

void Freer::close() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard guard(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
  stopping_ = false;
}

void Freer::comes_after(std::uint64_t ticket) {
  const std::lock_guard guard(mutex_);
  after_ = std::max(after_, ticket);
}

void Freer::add(std::uintptr_t raw, std::size_t bytes) {
  {
    const std::lock_guard guard(mutex_);
    waiting_.push_back({raw, bytes, after_});
    ++added_;
  }
  changed_.notify_all();
}

Status Freer::wait() {
  std::unique_lock guard(mutex_);
  added_ += refused_.size();
  waiting_.insert(waiting_.end(), refused_.begin(), refused_.end());
  refused_.clear();
  const std::uint64_t all = added_;
  changed_.notify_all();
  while (done_ < all && !captured()) changed_.wait_for(guard, kPoll);
  return refused_.empty() ? Status() : Status(refusal_.code(), refusal_.message());
}

std::uint64_t Freer::failures() {
  const std::lock_guard guard(mutex_);
  return failures_;
}

// The thread makes the context current at its first job; if the driver refuses, the next job
// retries.
Status Freer::enter_context() {
  if (entered_) return {};
  UMEM_RETURN_IF_ERROR(
      driver::check(table_.cuCtxSetCurrent(place_.context), driver::Entry::cuCtxSetCurrent));
  entered_ = true;
  return {};
}

Status Freer::free(const Job& job) {
  UMEM_RETURN_IF_ERROR(enter_context());
  ready_(job.after);
  return release_(job.raw);
}

void Freer::work() {
  // A capture that begins on another thread now would be invalidated by this call.
  cu::CUstreamCaptureMode mode = cu::CU_STREAM_CAPTURE_MODE_RELAXED;
  table_.cuThreadExchangeStreamCaptureMode(&mode);
  std::unique_lock guard(mutex_);
  while (true) {
    changed_.wait(guard, [this] { return stopping_ || !waiting_.empty(); });
    if (stopping_) return;
    if (captured()) {
      changed_.wait_for(guard, kPoll);
      continue;
    }
    const Job job = waiting_.front();
    waiting_.pop_front();
    guard.unlock();
    Status status = free(job);
    if (status.ok()) freed_(job.bytes);
    guard.lock();
    if (!status.ok()) {
      refused_.push_back(job);
      refusal_ = std::move(status);
      ++failures_;
    }
    ++done_;
    UMEM_ASSERT(done_ <= added_, "each range is freed once");
    changed_.notify_all();
  }
}

}  // namespace umem::managed
