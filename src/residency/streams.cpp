#include "residency/streams.h"

#include <algorithm>
#include <utility>

namespace umem::residency {

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

Status Streams::record(Stream& stream, std::uint64_t now) {
  cu::CUevent event = nullptr;
  if (stream.marks.size() < kMarks) {
    UMEM_RETURN_IF_ERROR(
        check(table_.cuEventCreate(&event, cu::CU_EVENT_DISABLE_TIMING), Entry::cuEventCreate));
  } else {
    event = stream.marks.front().event;
    stream.marks.pop_front();
  }
  const cu::CUresult result = table_.cuEventRecord(event, stream.handle);
  if (result != cu::CUDA_SUCCESS) {
    table_.cuEventDestroy(event);
    return check(result, Entry::cuEventRecord);
  }
  stream.marks.push_back({now, event});
  stream.ops = 0;
  return {};
}

Status Streams::mark(cu::CUstream stream, std::uint64_t now) {
  Stream& known = find(stream);
  if (++known.ops < kOpsPerMark || driver::capturing(table_, place_, stream)) return {};
  return record(known, now);
}

Status Streams::after(std::uint32_t mask, std::uint64_t used, std::uint64_t now,
                      std::vector<cu::CUevent>& events) {
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    if ((mask >> std::min<std::size_t>(i, 31) & 1) == 0) continue;
    Stream& stream = streams_[i];
    auto mark = std::lower_bound(stream.marks.begin(), stream.marks.end(), used,
                                 [](const Mark& m, std::uint64_t time) { return m.time < time; });
    if (mark == stream.marks.end()) {
      // What is being captured does not run now.
      if (driver::capturing(table_, place_, stream.handle)) continue;
      // For a transfer the order is a matter of speed: a stream that is gone must not keep bytes.
      Status recorded = record(stream, now);
      if (!recorded.ok() && used == kAll) return recorded;
      if (!recorded.ok()) continue;
      mark = std::prev(stream.marks.end());
    }
    if (std::find(events.begin(), events.end(), mark->event) == events.end())
      events.push_back(mark->event);
  }
  return {};
}

}  // namespace umem::residency
