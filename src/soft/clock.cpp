#include "soft/clock.h"

#include <algorithm>

namespace umem::soft {
namespace {

constexpr double kQueryUs = 1.0;
constexpr int kPatience = 100;
constexpr std::uintptr_t kLastNamedStream = 2;  // NULL, legacy, per-thread: one time line

std::uintptr_t key(const void* handle) {
  return reinterpret_cast<std::uintptr_t>(handle);
}

}  // namespace

cu::CUstream Clock::create_stream() {
  next_handle_ += 0x10;
  streams_.emplace(next_handle_, host_us_);
  return reinterpret_cast<cu::CUstream>(next_handle_);
}

bool Clock::destroy_stream(cu::CUstream stream) {
  return streams_.erase(key(stream)) == 1;
}

bool Clock::known(cu::CUstream stream) const {
  return key(stream) <= kLastNamedStream || streams_.count(key(stream)) == 1;
}

cu::CUevent Clock::create_event(bool timed) {
  next_handle_ += 0x10;
  events_.emplace(next_handle_, Event{0, timed, false});
  return reinterpret_cast<cu::CUevent>(next_handle_);
}

bool Clock::destroy_event(cu::CUevent event) {
  return events_.erase(key(event)) == 1;
}

double& Clock::tail(cu::CUstream stream) {
  return key(stream) <= kLastNamedStream ? default_tail_ : streams_.find(key(stream))->second;
}

Clock::Event* Clock::find(cu::CUevent event) {
  auto it = events_.find(key(event));
  return it == events_.end() ? nullptr : &it->second;
}

void Clock::launch(cu::CUstream stream, double us) {
  double& end = tail(stream);
  end = std::max(end, host_us_) + us;
}

double Clock::enqueue(double ready, std::size_t bytes, double rate, double& lane_free) {
  if (bytes == 0) return ready;
  lane_free = std::max(ready, lane_free) + static_cast<double>(bytes) / rate;
  return lane_free;
}

void Clock::transfer(cu::CUstream stream, std::size_t bytes_in, std::size_t bytes_out) {
  double& end = tail(stream);
  const double ready = std::max(end, host_us_);
  end = std::max(enqueue(ready, bytes_in, profile_.bytes_per_us_in, in_free_),
                 enqueue(ready, bytes_out, profile_.bytes_per_us_out, out_free_));
}

void Clock::fault(std::size_t bytes_in, std::size_t bytes_out) {
  const double ready = std::max(default_tail_, host_us_);
  // The leaving page must be out before the other can arrive.
  const double out = enqueue(ready, bytes_out, profile_.bytes_per_us_out, out_free_);
  const double in = enqueue(out, bytes_in, profile_.bytes_per_us_in, in_free_);
  default_tail_ = in + profile_.fault_us;
  stall_us_ += default_tail_ - ready;
}

bool Clock::record(cu::CUevent event, cu::CUstream stream, std::uint32_t ticket) {
  Event* e = find(event);
  if (!e) return false;
  e->ticket = ticket;
  e->us = std::max(tail(stream), host_us_);
  e->recorded = true;
  return true;
}

std::uint32_t Clock::ticket_for(cu::CUstream stream, cu::CUevent event) {
  const Event* e = find(event);
  return e && e->recorded && key(stream) <= kLastNamedStream ? e->ticket : 0;
}

bool Clock::wait(cu::CUstream stream, cu::CUevent event) {
  const Event* e = find(event);
  if (!e) return false;
  if (!e->recorded) return true;  // an event never recorded counts as complete
  double& end = tail(stream);
  const double ready = std::max(end, host_us_);
  if (e->us > ready && &end == &default_tail_) stall_us_ += e->us - ready;
  end = std::max(ready, e->us);
  return true;
}

double Clock::arrived_us() const {
  return std::max(host_us_, out_free_);
}

void Clock::wait_for_host(cu::CUstream stream, std::size_t work) {
  double& end = tail(stream);
  const double ready = std::max(end, host_us_), done = host_.end_of(work);
  if (done > ready && &end == &default_tail_) stall_us_ += done - ready;
  end = std::max(ready, done);
}

void Clock::synchronize(cu::CUstream stream) {
  host_us_ = std::max(host_us_, tail(stream));
}

void Clock::synchronize_all() {
  host_us_ = std::max(host_us_, default_tail_);
  for (const auto& [handle, end] : streams_) host_us_ = std::max(host_us_, end);
}

bool Clock::synchronize(cu::CUevent event) {
  const Event* e = find(event);
  if (!e) return false;
  host_us_ = std::max(host_us_, e->us);
  return true;
}

bool Clock::reached(double us) {
  if (us <= host_us_) return true;
  asked_ = asked_us_ == host_us_ ? asked_ + 1 : 0;
  if (asked_ >= kPatience) host_us_ += kQueryUs;
  asked_us_ = host_us_;
  return us <= host_us_;
}

bool Clock::done(cu::CUstream stream) {
  return reached(tail(stream));
}

Clock::EventState Clock::query(cu::CUevent event) {
  const Event* e = find(event);
  if (!e) return EventState::kUnknown;
  return reached(e->us) ? EventState::kDone : EventState::kPending;
}

Clock::Elapsed Clock::elapsed(cu::CUevent start, cu::CUevent end, float& milliseconds) {
  const Event* a = find(start);
  const Event* b = find(end);
  if (!a || !b) return Elapsed::kUnknown;
  if (!a->timed || !b->timed || !a->recorded || !b->recorded) return Elapsed::kNotTimed;
  if (std::max(a->us, b->us) > host_us_) return Elapsed::kPending;
  milliseconds = static_cast<float>((b->us - a->us) / 1e3);
  return Elapsed::kOk;
}

}  // namespace umem::soft
