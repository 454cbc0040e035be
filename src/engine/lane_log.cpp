#include "engine/lane_log.h"

#include <chrono>
#include <utility>

namespace umem::engine {

using driver::check;

namespace {

std::int64_t now_ns() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

std::int64_t ns_of(float milliseconds) {
  return static_cast<std::int64_t>(static_cast<double>(milliseconds) * 1e6);
}

}  // namespace

const char* name(Verb verb) {
  switch (verb) {
    case Verb::kBringIn:
      return "bring in";
    case Verb::kPopulate:
    case Verb::kPopulateFresh:
      return "populate";
    case Verb::kDiscard:
      return "discard";
    case Verb::kSendOut:
      return "send out";
    case Verb::kDrop:
      return "drop";
    case Verb::kWriteBack:
      return "write back";
    case Verb::kUseOnHost:
      return "use on host";
  }
  return "";
}

// An event on a stream; null if the driver refuses.
cu::CUevent LaneLog::mark(cu::CUstream stream) const {
  cu::CUevent event = nullptr;
  if (table_.cuEventCreate(&event, 0) != cu::CUDA_SUCCESS) return nullptr;
  if (table_.cuEventRecord(event, stream) == cu::CUDA_SUCCESS) return event;
  table_.cuEventDestroy(event);
  return nullptr;
}

Status LaneLog::start() {
  Log log;
  if (place_.context) {
    // Recorded on an idle stream, so that the event matches the host's clock.
    cu::CUstream stream = nullptr;
    UMEM_RETURN_IF_ERROR(check(table_.cuStreamCreate(&stream, cu::CU_STREAM_NON_BLOCKING),
                               driver::Entry::cuStreamCreate));
    const std::int64_t before_ns = now_ns();
    log.base = mark(stream);
    FirstError error;
    error.keep(check(table_.cuStreamSynchronize(stream), driver::Entry::cuStreamSynchronize));
    log.base_ns = before_ns + (now_ns() - before_ns) / 2;
    error.keep(check(table_.cuStreamDestroy(stream), driver::Entry::cuStreamDestroy));
    if (Status status = error.take(); !status.ok()) {
      clear(log);
      return status;
    }
  }
  {
    const std::lock_guard guard(mutex_);
    std::swap(log, current_);
    ++starts_;
    on_ = true;
  }
  clear(log);  // of an earlier start
  return {};
}

std::vector<Transfer> LaneLog::take(std::size_t& left_out) {
  Log log;
  {
    const std::lock_guard guard(mutex_);
    on_ = false;
    std::swap(log, current_);
  }
  // Without the lock, because the driver is called for each.
  std::vector<Transfer> taken;
  for (Logged& logged : log.logged)
    if (timed(log, logged)) taken.push_back(logged.transfer);
  left_out += log.left_out;
  clear(log);
  return taken;
}

// True if it is complete and its times are known.
bool LaneLog::timed(const Log& log, Logged& logged) const {
  Transfer& transfer = logged.transfer;
  if (!place_.context) return transfer.end_ns > 0;
  if (!log.base || !logged.begin || !logged.end) return false;
  float before = 0, lasted = 0;
  if (table_.cuEventElapsedTime(&before, log.base, logged.begin) != cu::CUDA_SUCCESS ||
      table_.cuEventElapsedTime(&lasted, logged.begin, logged.end) != cu::CUDA_SUCCESS)
    return false;
  transfer.begin_ns = log.base_ns + ns_of(before);
  transfer.end_ns = transfer.begin_ns + ns_of(lasted);
  return true;
}

void LaneLog::clear(const Log& log) const {
  for (const Logged& logged : log.logged)
    for (cu::CUevent event : {logged.begin, logged.end})
      if (event) table_.cuEventDestroy(event);
  if (log.base) table_.cuEventDestroy(log.base);
}

LaneLog::Entry::Entry(LaneLog& log, Verb verb, std::size_t bytes, cu::CUstream stream)
    : log_(log), stream_(stream) {
  if (!log_.on_.load(std::memory_order_relaxed)) return;
  const std::lock_guard guard(log_.mutex_);
  if (!log_.on_) return;
  if (log_.current_.logged.size() == kMost) {
    ++log_.current_.left_out;
    return;
  }
  start_ = log_.starts_;
  at_ = log_.current_.logged.size();
  Logged& logged = log_.current_.logged.emplace_back();
  logged.transfer = {verb, bytes, 0, 0};
  if (log_.place_.context)
    logged.begin = log_.mark(stream_);
  else
    logged.transfer.begin_ns = now_ns();
}

LaneLog::Entry::~Entry() {
  if (start_ == 0) return;
  const std::lock_guard guard(log_.mutex_);
  if (!log_.on_ || log_.starts_ != start_) return;  // the log has ended meanwhile
  Logged& logged = log_.current_.logged[at_];
  if (log_.place_.context)
    logged.end = log_.mark(stream_);
  else
    logged.transfer.end_ns = now_ns();
}

}  // namespace umem::engine
