#include "trace/timers.h"

#include <algorithm>

namespace umem::trace {

using cu::CUDA_SUCCESS;

Timers::~Timers() {
  const driver::CallScope scope(table_, place_);
  for (const Pair& pair : pairs_) {
    if (pair.begin) table_.cuEventDestroy(pair.begin);
    if (pair.end) table_.cuEventDestroy(pair.end);
  }
}

int Timers::take() {
  if (!free_.empty()) {
    const int timer = free_.back();
    free_.pop_back();
    return timer;
  }
  if (pairs_.size() == kMax) return kNoTimer;
  Pair pair;
  if (table_.cuEventCreate(&pair.begin, cu::CU_EVENT_DEFAULT) != CUDA_SUCCESS) return kNoTimer;
  if (table_.cuEventCreate(&pair.end, cu::CU_EVENT_DEFAULT) != CUDA_SUCCESS) {
    table_.cuEventDestroy(pair.begin);
    return kNoTimer;
  }
  pairs_.push_back(pair);
  return static_cast<int>(pairs_.size() - 1);
}

void Timers::release(int timer) {
  if (timer != kNoTimer) free_.push_back(timer);
}

int Timers::start(cu::CUstream stream) {
  if (place_.captures && *place_.captures > 0) return kNoTimer;
  const driver::CallScope scope(table_, place_);
  const int timer = take();
  if (timer == kNoTimer) return kNoTimer;
  Pair& pair = pairs_[static_cast<std::size_t>(timer)];
  if (table_.cuEventRecord(pair.begin, stream) != CUDA_SUCCESS) {
    release(timer);
    return kNoTimer;
  }
  pair.use = ++uses_;
  pair.parent = kNoTimer;
  pair.nested_us = 0;
  pair.spoilt = false;
  return timer;
}

void Timers::stop(int timer, cu::CUstream stream, std::uint64_t event, int parent) {
  Pair& pair = pairs_[static_cast<std::size_t>(timer)];
  const bool captures = place_.captures && *place_.captures > 0;
  const driver::CallScope scope(table_, place_);
  if (captures || table_.cuEventRecord(pair.end, stream) != CUDA_SUCCESS) {
    spoil(parent);
    release(timer);
    return;
  }
  pair.event = event;
  pair.parent = parent;
  if (parent != kNoTimer) pair.parent_use = pairs_[static_cast<std::size_t>(parent)].use;
  ended_.push_back(timer);
}

void Timers::disown(std::uint64_t event) {
  if (ended_.empty()) return;
  Pair& last = pairs_[static_cast<std::size_t>(ended_.back())];
  if (last.event == event) last.event = kNoEvent;
}

void Timers::spoil(int timer) {
  if (timer != kNoTimer) pairs_[static_cast<std::size_t>(timer)].spoilt = true;
}

std::vector<cu::CUevent> Timers::ended() const {
  std::vector<cu::CUevent> events;
  for (int timer : ended_) events.push_back(pairs_[static_cast<std::size_t>(timer)].end);
  return events;
}

void Timers::wait(const std::vector<cu::CUevent>& events) const {
  if (place_.captures && *place_.captures > 0) return;
  const driver::CallScope scope(table_, place_);
  // If it fails, the op has no time.
  for (cu::CUevent event : events) table_.cuEventSynchronize(event);
}

void Timers::resolve(const std::function<void(std::uint64_t, float)>& found) {
  if (place_.captures && *place_.captures > 0) return;
  const driver::CallScope scope(table_, place_);
  while (!ended_.empty()) {
    const int timer = ended_.front();
    Pair& pair = pairs_[static_cast<std::size_t>(timer)];
    const cu::CUresult state = table_.cuEventQuery(pair.end);
    if (state == cu::CUDA_ERROR_NOT_READY) return;
    float milliseconds = 0;
    const bool known = state == CUDA_SUCCESS && table_.cuEventElapsedTime(&milliseconds, pair.begin,
                                                                          pair.end) == CUDA_SUCCESS;
    const float us = milliseconds * 1e3f;
    found(pair.event, known && !pair.spoilt ? std::max(us - pair.nested_us, 0.f) : -1.f);
    if (pair.parent != kNoTimer) {
      Pair& parent = pairs_[static_cast<std::size_t>(pair.parent)];
      if (parent.use == pair.parent_use) parent.nested_us += us;
      if (parent.use == pair.parent_use && !known) parent.spoilt = true;
    }
    ended_.pop_front();
    release(timer);
  }
}

std::uint64_t Timers::first_open(std::uint64_t none) const {
  for (const int timer : ended_) {
    const std::uint64_t event = pairs_[static_cast<std::size_t>(timer)].event;
    if (event != kNoEvent) return event;
  }
  return none;
}

}  // namespace umem::trace
