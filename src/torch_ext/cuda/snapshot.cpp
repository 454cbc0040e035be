// The part of History that answers torch.cuda.memory._snapshot.
#include <algorithm>

#include "runtime/accounts.h"
#include "torch_ext/cuda/history.h"

namespace umem::torch_ext {
namespace {

using c10::CachingDeviceAllocator::BlockInfo;
using c10::CachingDeviceAllocator::SegmentInfo;

// Without stacks: the caller knows those.
SegmentInfo segment_info(const arena::SegmentRow& row, int device) {
  SegmentInfo info;
  info.device = static_cast<c10::DeviceIndex>(device);
  info.address = row.base;
  info.total_size = row.bytes;
  info.stream = reinterpret_cast<void*>(row.stream);
  info.is_large = row.large;
  for (const arena::BlockRow& block : row.blocks) {
    BlockInfo& added = info.blocks.emplace_back();
    added.size = block.bytes;
    added.requested_size = block.requested;
    added.allocated = block.allocated;
    added.active = block.active;
    if (block.allocated) info.allocated_size += block.bytes;
    if (block.active) info.active_size += block.bytes;
    if (block.active) info.requested_size += block.requested;
  }
  return info;
}

}  // namespace

void History::append_to(Snapshot& snapshot, int device_count, bool include_traces) {
  for (int device = 0; device < device_count; ++device) append_segments(snapshot, device);
  if (include_traces) append_traces(snapshot);
}

void History::append_segments(Snapshot& snapshot, int device) {
  const std::vector<arena::SegmentRow> rows = runtime::segments(device);
  std::lock_guard guard(mutex_);
  const auto context = [](const LiveMap& known, std::uintptr_t address) {
    const auto found = known.find(address);
    return found == known.end() ? nullptr : found->second.context;
  };
  for (const arena::SegmentRow& row : rows) {
    SegmentInfo& info = snapshot.segments.emplace_back(segment_info(row, device));
    info.context_when_allocated = context(segments_, row.base);
    for (std::size_t i = 0; i < row.blocks.size(); ++i)
      if (row.blocks[i].active)
        info.blocks[i].context_when_allocated = context(blocks_, row.blocks[i].address);
  }
}

void History::append_traces(Snapshot& snapshot) {
  std::lock_guard guard(mutex_);
  if (!clock_) return;
  const auto to_ns = clock_->makeConverter();
  for (const auto& [device, recorded] : traces_) {
    const auto index = static_cast<std::size_t>(device);
    if (snapshot.device_traces.size() <= index) snapshot.device_traces.resize(index + 1);
    std::vector<Entry>& trace = snapshot.device_traces[index];
    for (const Entry& entry : recorded)
      trace.emplace_back(entry).time_.t_ = to_ns(entry.time_.approx_t_) / 1000;  // torch's unit: us
    std::stable_sort(trace.begin(), trace.end(),
                     [](const Entry& a, const Entry& b) { return a.time_.t_ < b.time_.t_; });
  }
}

}  // namespace umem::torch_ext
