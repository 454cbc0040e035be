#include "engine/streams.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/assert.h"

namespace umem::engine {

using driver::check;
using driver::Entry;

Status Streams::close() {
  FirstError error;
  for (const Stream& stream : streams_)
    for (const Mark& mark : stream.marks)
      error.keep(check(table_.cuEventDestroy(mark.event), Entry::cuEventDestroy));
  streams_.clear();
  return error.take();
}

Streams::Stream& Streams::find(cu::CUstream stream) {
  for (Stream& known : streams_)
    if (known.handle == stream) return known;
  streams_.emplace_back().handle = stream;
  return streams_.back();
}

std::uint32_t Streams::bit(cu::CUstream stream) {
  const auto index = static_cast<std::size_t>(&find(stream) - streams_.data());
  return 1u << std::min<std::size_t>(index, 31);
}

std::deque<Streams::Mark>::iterator Streams::first_from(Stream& stream, std::uint64_t time) {
  return std::lower_bound(stream.marks.begin(), stream.marks.end(), time,
                          [](const Mark& mark, std::uint64_t t) { return mark.time < t; });
}

Status Streams::record(Stream& stream, std::uint64_t now) {
  if (stream.marks.size() < kMarks) {
    cu::CUevent event = nullptr;
    UMEM_RETURN_IF_ERROR(
        check(table_.cuEventCreate(&event, cu::CU_EVENT_DISABLE_TIMING), Entry::cuEventCreate));
    stream.marks.push_front({0, event});
  }
  // Recorded again in place, because a submission that waits in a lane may hold the event.
  UMEM_RETURN_IF_ERROR(
      check(table_.cuEventRecord(stream.marks.front().event, stream.handle), Entry::cuEventRecord));
  UMEM_ASSERT(now >= stream.marks.back().time, "marks are by time");
  stream.marks.push_back({now, stream.marks.front().event});
  stream.marks.pop_front();
  stream.ops = 0;
  return {};
}

Status Streams::mark(cu::CUstream stream, std::uint64_t now) {
  Stream& known = find(stream);
  if (++known.ops < kOpsPerMark || driver::capturing(table_, place_, stream)) return {};
  return record(known, now);
}

Status Streams::after(std::uint32_t mask, std::uint64_t used, std::uint64_t now,
                      std::vector<cu::CUevent>& events, bool strict) {
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    if ((mask >> std::min<std::size_t>(i, 31) & 1) == 0) continue;
    Stream& stream = streams_[i];
    auto mark = first_from(stream, used);
    if (mark == stream.marks.end()) {
      // Captured work does not run now.
      if (driver::capturing(table_, place_, stream.handle)) {
        if (strict) return {Code::kBadState, "a stream that used the bytes is being captured"};
        continue;
      }
      if (Status recorded = record(stream, now); !recorded.ok()) {
        if (strict) return recorded;
        continue;
      }
      mark = std::prev(stream.marks.end());
    }
    if (std::find(events.begin(), events.end(), mark->event) == events.end())
      events.push_back(mark->event);
  }
  return {};
}

Status Streams::after_time(cu::CUstream stream, std::uint64_t time, std::uint64_t now,
                           std::vector<cu::CUevent>& events) {
  if (driver::capturing(table_, place_, stream))
    return {Code::kBadState, "the stream of the bytes is being captured"};
  Stream& known = find(stream);
  auto mark = first_from(known, time);
  if (mark == known.marks.end()) {
    UMEM_RETURN_IF_ERROR(record(known, now));
    mark = std::prev(known.marks.end());
  }
  events.push_back(mark->event);
  return {};
}

Status Streams::after_all(cu::CUstream stream, std::uint64_t now,
                          std::vector<cu::CUevent>& events) {
  return after_time(stream, std::numeric_limits<std::uint64_t>::max(), now, events);
}

}  // namespace umem::engine
