#include "engine/lane.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/assert.h"
#include "base/thread.h"
#include "driver/capabilities.h"

namespace umem::engine {

using driver::check;
using driver::Entry;

namespace {

std::size_t bytes_of(const std::vector<managed::MemSpan>& spans) {
  std::size_t bytes = 0;
  for (const managed::MemSpan& span : spans) bytes += span.bytes;
  return bytes;
}

// Bytes that make room when they have left.
std::size_t leaving(Verb verb, const std::vector<managed::MemSpan>& spans) {
  const bool stays = verb == Verb::kWriteBack || verb == Verb::kUseOnHost;
  return stays ? 0 : bytes_of(spans);
}

bool places(Verb verb) {
  return verb == Verb::kBringIn || verb == Verb::kPopulate || verb == Verb::kPopulateFresh ||
         verb == Verb::kUseOnHost;
}

// For messages.
const char* what(Verb verb) {
  switch (verb) {
    case Verb::kBringIn:
      return "bring memory to the device";
    case Verb::kPopulate:
    case Verb::kPopulateFresh:
      return "place new memory on the device";
    case Verb::kDiscard:
      return "discard memory";
    case Verb::kSendOut:
    case Verb::kDrop:
      return "evict memory to the host";
    case Verb::kWriteBack:
      return "copy memory to the host";
    case Verb::kUseOnHost:
      return "map memory of the host";
  }
  return "";
}

}  // namespace

// A lane is still open only while the process ends: no caller is left to join its thread.
Lane::~Lane() {
  if (thread_.joinable()) thread_.detach();
}

Status Lane::open() {
  UMEM_RETURN_IF_ERROR(
      check(table_.cuStreamCreate(&stream_, cu::CU_STREAM_NON_BLOCKING), Entry::cuStreamCreate));
  if (place_.context) {
    UMEM_RETURN_IF_ERROR(Watchdog::the().watch(place_.device, watched_));
    memory_ops_.set_host_node(driver::nearest_host_node(table_, place_.device));
  }
  return threaded_ ? start_thread(thread_, "moves memory", [this] { work(); }) : Status();
}

Status Lane::close() {
  if (thread_.joinable()) {
    {
      const std::lock_guard guard(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  FirstError error;
  for (const Issued& issued : under_way_) spare_events_.push_back(issued.event);
  under_way_.clear();
  for (cu::CUevent event : spare_events_)
    error.keep(check(table_.cuEventDestroy(event), Entry::cuEventDestroy));
  spare_events_.clear();
  std::size_t left_out = 0;
  log_.take(left_out);
  error.keep(meter_.close());
  if (stream_) error.keep(check(table_.cuStreamDestroy(stream_), Entry::cuStreamDestroy));
  stream_ = nullptr;
  Watchdog::the().forget(std::exchange(watched_, nullptr));
  return error.take();
}

Result<Ticket> Lane::submit(Verb verb, const std::vector<managed::MemSpan>& spans,
                            const std::vector<cu::CUevent>& after, bool copies) {
  const Ticket ticket = ++last_;
  if (threaded_) {
    {
      const std::lock_guard guard(mutex_);
      waiting_.push_back({ticket, verb, spans, after, std::exchange(before_, {}), copies});
      waiting_bytes_ += leaving(verb, spans);
    }
    changed_.notify_all();
    return ticket;
  }
  Status status = make(verb, spans, after, std::exchange(before_, {}), copies);
  const std::lock_guard guard(mutex_);
  const Status finished = finish(ticket, verb, leaving(verb, spans));
  if (!status.ok() && !usable(status)) return status;
  failures_ += status.ok() && finished.ok() ? 0 : 1;
  return ticket;
}

// Nothing else would make mapped bytes usable, so a call that fails once is made again. The thread
// may not have the context, if the driver refused it at first.
Status Lane::make(Verb verb, const std::vector<managed::MemSpan>& spans,
                  const std::vector<cu::CUevent>& after, const std::vector<Before>& before,
                  bool copies) {
  Status status = issue(verb, spans, after, before, copies);
  if (!mapped_ || status.ok()) return status;
  UMEM_RETURN_IF_ERROR(check(table_.cuCtxSetCurrent(place_.context), Entry::cuCtxSetCurrent));
  status = issue(verb, spans, after, before, copies);
  if (!usable(status) || !places(verb)) return status;
  if (std::all_of(spans.begin(), spans.end(),
                  [&](const managed::MemSpan& span) { return mapped_->holds(span); }))
    return status;
  return {Code::kOutOfHostMemory, status.message()};  // some are mapped nowhere
}

Status Lane::issue(Verb verb, const std::vector<managed::MemSpan>& spans,
                   const std::vector<cu::CUevent>& after, const std::vector<Before>& before,
                   bool copies) {
  const Watchdog::Call call(watched_, what(verb));
  if (mapped_) UMEM_RETURN_IF_ERROR(wait_for(verb, spans, after, before));
  for (cu::CUevent event : after)
    if (!mapped_)
      UMEM_RETURN_IF_ERROR(
          check(table_.cuStreamWaitEvent(stream_, event, 0), Entry::cuStreamWaitEvent));
  const std::size_t bytes = bytes_of(spans);
  const LaneLog::Entry logged(log_, verb, bytes, stream_);
  const bool timed = copies && meter_.begin(bytes, stream_);
  Status status = mapped_ ? run_mapped(verb, spans) : run(verb, spans);
  if (timed && status.ok()) meter_.end(stream_);
  return status;
}

// The calls that change mappings act at once, so the thread waits, not the stream.
Status Lane::wait_for(Verb verb, const std::vector<managed::MemSpan>& spans,
                      const std::vector<cu::CUevent>& after, const std::vector<Before>& before) {
  for (const Before& each : before) UMEM_RETURN_IF_ERROR(each.lane->wait_complete(each.ticket));
  // Work that uses the bytes is over where they were given back since.
  const bool fresh = verb == Verb::kPopulate || verb == Verb::kPopulateFresh;
  if (fresh && std::none_of(spans.begin(), spans.end(),
                            [&](const managed::MemSpan& span) { return mapped_->holds(span); }))
    return {};
  for (cu::CUevent event : after)
    UMEM_RETURN_IF_ERROR(check(table_.cuEventSynchronize(event), Entry::cuEventSynchronize));
  return {};
}

// Polls, because an event that is waited for could be recorded again for a later submission.
Status Lane::wait_complete(Ticket ticket) {
  std::unique_lock guard(mutex_);
  changed_.wait(guard, [&] { return issued_ >= ticket; });
  if (missed_ >= ticket) UMEM_RETURN_IF_ERROR(record_end(issued_, 0));
  while (true) {
    poll();
    if (ticket <= complete_ || under_way_.empty()) return {};
    const cu::CUresult reached = table_.cuEventQuery(under_way_.front().event);
    if (reached != cu::CUDA_SUCCESS && reached != cu::CUDA_ERROR_NOT_READY)
      return check(reached, Entry::cuEventQuery);  // nothing on this device ends any more
    guard.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(10));
    guard.lock();
  }
}

Status Lane::run_mapped(Verb verb, const std::vector<managed::MemSpan>& spans) {
  FirstError error;
  for (const managed::MemSpan& span : spans) {
    switch (verb) {
      case Verb::kBringIn:
        error.keep(mapped_->bring_in(span, stream_));
        break;
      case Verb::kPopulate:
      case Verb::kPopulateFresh:
        error.keep(mapped_->populate(span));
        break;
      case Verb::kDiscard:
        error.keep(mapped_->discard(span));
        break;
      case Verb::kSendOut:
        error.keep(mapped_->send_out(span, stream_));
        break;
      case Verb::kUseOnHost:
        error.keep(mapped_->use_on_host(span));
        break;
      case Verb::kDrop:
      case Verb::kWriteBack:
        UMEM_ASSERT(false, "mapped memory has one place");
    }
  }
  return error.take();
}

Status Lane::run(Verb verb, const std::vector<managed::MemSpan>& spans) {
  switch (verb) {
    case Verb::kBringIn:
    case Verb::kPopulateFresh:
      return memory_ops_.prefetch(spans, managed::Where::kDevice, stream_);
    case Verb::kPopulate:
      return memory_ops_.discard_and_prefetch(spans, stream_);
    case Verb::kDiscard:
      return memory_ops_.discard(spans, stream_);
    case Verb::kSendOut:
      return memory_ops_.prefetch(spans, managed::Where::kHost, stream_);
    case Verb::kDrop:
      return drop(spans);
    case Verb::kWriteBack:
      return write_back(spans);
    case Verb::kUseOnHost:
      return {};  // by page faults
  }
  return {};
}

// Advice takes effect at the call: after the work that the stream waits for and contains.
Status Lane::catch_up() {
  if (!threaded_) return {};
  return check(table_.cuStreamSynchronize(stream_), Entry::cuStreamSynchronize);
}

Status Lane::write_back(const std::vector<managed::MemSpan>& spans) {
  UMEM_RETURN_IF_ERROR(catch_up());
  FirstError error;
  for (const managed::MemSpan& span : spans) error.keep(managed::advise_read_mostly(table_, span));
  error.keep(memory_ops_.prefetch(spans, managed::Where::kHost, stream_));
  return error.take();
}

// A prefetch to the host would leave read-mostly bytes on the device as well. So the advice is
// suspended while they leave: a valid copy on the host is kept, and bytes written since are moved
// by the prefetch.
Status Lane::drop(const std::vector<managed::MemSpan>& spans) {
  UMEM_RETURN_IF_ERROR(catch_up());
  FirstError error;
  for (const managed::MemSpan& span : spans)
    error.keep(managed::collapse_copies(table_, span, managed::Where::kHost, place_.device));
  error.keep(memory_ops_.prefetch(spans, managed::Where::kHost, stream_));
  error.keep(catch_up());  // otherwise the bytes still to be moved would be copied
  for (const managed::MemSpan& span : spans) error.keep(managed::advise_read_mostly(table_, span));
  return error.take();
}

Result<cu::CUevent> Lane::take_event() {
  if (!spare_events_.empty()) {
    cu::CUevent event = spare_events_.back();
    spare_events_.pop_back();
    return event;
  }
  cu::CUevent event = nullptr;
  UMEM_RETURN_IF_ERROR(
      check(table_.cuEventCreate(&event, cu::CU_EVENT_DISABLE_TIMING), Entry::cuEventCreate));
  return event;
}

// Requires the lock. All moves of mapped memory but a copy to the device are over once issued.
Status Lane::finish(Ticket ticket, Verb verb, std::size_t bytes) {
  const bool over = mapped_ && verb != Verb::kBringIn;
  if (!over || missed_ > 0 || !under_way_.empty()) return record_end(ticket, bytes);
  UMEM_ASSERT(ticket > issued_, "a lane issues in the order of submission");
  issued_ = complete_ = ticket;
  issued_bytes_ += bytes;
  complete_bytes_ = issued_bytes_;
  return {};
}

// Requires the lock. An event after the submission, for others to wait for.
Status Lane::record_end(Ticket ticket, std::size_t bytes) {
  UMEM_ASSERT(ticket >= issued_ && complete_ <= issued_,
              "a lane issues in the order of submission");
  issued_ = ticket;
  missed_ = ticket;  // until its event is recorded
  issued_bytes_ += bytes;
  Result<cu::CUevent> event = take_event();
  if (!event.ok()) return event.take_status();
  Status recorded = check(table_.cuEventRecord(event.value(), stream_), Entry::cuEventRecord);
  if (!recorded.ok()) {
    spare_events_.push_back(event.value());
    return recorded;
  }
  missed_ = 0;
  UMEM_ASSERT(under_way_.empty() || under_way_.back().ticket <= ticket,
              "submissions are by ticket");
  under_way_.push_back({ticket, bytes, issued_bytes_, event.value()});
  // A wait for a forgotten ticket becomes a wait for a later one.
  const std::size_t kept = place_.context ? 64 : 4096;
  while (under_way_.size() > kept) {
    under_way_[1].bytes += under_way_.front().bytes;
    spare_events_.push_back(under_way_.front().event);
    under_way_.pop_front();
  }
  return {};
}

Status Lane::make_wait(Lane& lane, Ticket ticket) {
  if (!lane.mapped_) return make_wait(lane.stream_, ticket);
  if (ticket > 0) lane.before_.push_back({this, ticket});
  return {};
}

Status Lane::make_wait(cu::CUstream stream, Ticket ticket) {
  if (ticket == 0) return {};
  UMEM_ASSERT(ticket <= last_, "a wait for what was never submitted would not end");
  std::unique_lock guard(mutex_);
  changed_.wait(guard, [&] { return issued_ >= ticket; });
  if (place_.context) poll();  // the software device's time cannot be polled
  if (ticket <= complete_) return {};
  if (missed_ >= ticket) UMEM_RETURN_IF_ERROR(record_end(issued_, 0));
  // The first event at or after the ticket, because the lane is in order.
  const auto found = std::partition_point(under_way_.begin(), under_way_.end(),
                                          [&](const Issued& i) { return i.ticket < ticket; });
  if (found == under_way_.end()) return {};
  Status waits = check(table_.cuStreamWaitEvent(stream, found->event, 0), Entry::cuStreamWaitEvent);
  if (waits.ok() || !mapped_) return waits;
  guard.unlock();
  return wait_complete(ticket);  // the driver does not order accesses to mapped memory itself
}

// Requires the lock. Forgets completed submissions.
void Lane::poll() {
  while (!under_way_.empty()) {
    if (table_.cuEventQuery(under_way_.front().event) != cu::CUDA_SUCCESS) return;
    UMEM_ASSERT(under_way_.front().ticket >= complete_, "submissions complete in order");
    complete_ = under_way_.front().ticket;
    complete_bytes_ = under_way_.front().through;
    spare_events_.push_back(under_way_.front().event);
    under_way_.pop_front();
  }
}

void Lane::issue_until(Ticket ticket) {
  UMEM_ASSERT(ticket <= last_, "a wait for what was never submitted would not end");
  std::unique_lock guard(mutex_);
  changed_.wait(guard, [&] { return issued_ >= ticket; });
}

std::size_t Lane::under_way() {
  const std::lock_guard guard(mutex_);
  if (!place_.timed) return 0;
  poll();
  return bytes_under_way();
}

bool Lane::under_way(Ticket ticket) {
  const std::lock_guard guard(mutex_);
  if (!place_.timed || ticket == 0) return false;
  poll();
  return ticket > issued_ || (ticket > complete_ && !under_way_.empty());
}

// Requires the lock.
std::size_t Lane::bytes_under_way() const {
  std::size_t bytes = waiting_bytes_;  // including the thread's current job
  for (const Issued& issued : under_way_) bytes += issued.bytes;
  return bytes;
}

Ticket Lane::until(std::size_t allowed) {
  const std::lock_guard guard(mutex_);
  if (!threaded_) {
    if (issued_bytes_ <= allowed) return 0;
    const std::uint64_t needed = issued_bytes_ - allowed;
    if (needed <= complete_bytes_) return 0;
    const auto found = std::partition_point(under_way_.begin(), under_way_.end(),
                                            [&](const Issued& i) { return i.through < needed; });
    return found == under_way_.end() ? last() : found->ticket;
  }
  poll();
  std::size_t bytes = bytes_under_way();
  Ticket needed = 0;
  for (const Issued& issued : under_way_) {
    if (bytes <= allowed) return needed;
    bytes -= issued.bytes;
    needed = issued.ticket;
  }
  for (const Job& job : waiting_) {
    if (bytes <= allowed) return needed;
    bytes -= leaving(job.verb, job.spans);
    needed = job.ticket;
  }
  return bytes <= allowed ? needed : last();
}

std::uint64_t Lane::failures() {
  const std::lock_guard guard(mutex_);
  return failures_;
}

// For the few submissions whose outcome is asked for.
void Lane::note(Ticket ticket, const Status& status) {
  const std::lock_guard guard(mutex_);
  failed_.emplace_back(ticket, Status(status.code(), status.message()));
  if (failed_.size() > kNoted) failed_.pop_front();
  untaken_.push_back(ticket);
}

std::vector<Ticket> Lane::take_failed() {
  const std::lock_guard guard(mutex_);
  return std::exchange(untaken_, {});
}

Status Lane::outcome(Ticket ticket) {
  std::unique_lock guard(mutex_);
  changed_.wait(guard, [&] { return issued_ >= ticket; });
  for (const auto& [failed, status] : failed_)
    if (failed == ticket) return {status.code(), status.message()};
  return {};
}

void Lane::work() {
  // A capture on any thread would forbid this thread's calls, although they touch no captured
  // stream.
  cu::CUstreamCaptureMode mode = cu::CU_STREAM_CAPTURE_MODE_RELAXED;
  table_.cuThreadExchangeStreamCaptureMode(&mode);
  const driver::CallScope scope(table_, place_);
  std::unique_lock guard(mutex_);
  while (true) {
    changed_.wait(guard, [&] { return stopping_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    const Job job = std::move(waiting_.front());
    waiting_.pop_front();
    guard.unlock();
    Status status = make(job.verb, job.spans, job.after, job.before, job.copies);
    if (mapped_ && !status.ok() && !usable(status)) note(job.ticket, status);
    guard.lock();
    const std::size_t bytes = leaving(job.verb, job.spans);
    UMEM_ASSERT(waiting_bytes_ >= bytes, "what is issued was counted as waiting");
    waiting_bytes_ -= bytes;
    const Status finished = finish(job.ticket, job.verb, bytes);
    failures_ += (status.ok() ? 0 : 1) + (finished.ok() ? 0 : 1);
    changed_.notify_all();
  }
}

}  // namespace umem::engine
