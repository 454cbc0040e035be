#include "trace/recorder.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/thread_role.h"

namespace umem::trace {

struct Access {
  Used used;
  std::uint32_t id;
};

namespace {

// Untimed events get the mean of the op's others.
void fill_times(std::vector<Event>& events) {
  struct Mean {
    double sum = 0;
    std::size_t count = 0;
  };
  std::unordered_map<std::string_view, Mean> means;
  bool any_missing = false;
  for (const Event& event : events) {
    if (event.kind != EventKind::kOp) continue;
    any_missing |= event.us < 0;
    if (event.us < 0) continue;
    Mean& mean = means[event.name];
    mean.sum += static_cast<double>(event.us);
    ++mean.count;
  }
  if (!any_missing) return;
  for (Event& event : events) {
    if (event.kind != EventKind::kOp || event.us >= 0) continue;
    if (const auto found = means.find(event.name); found != means.end())
      event.us = static_cast<float>(found->second.sum / static_cast<double>(found->second.count));
  }
}

// Moves the rows of ops, requested in order, to the places of their accesses.
class PartMover {
 public:
  PartMover(const std::vector<Part>& from, std::vector<Part>& to) : from_(from), to_(to) {}
  // Moves those of `count` accesses starting at `first`, which are renumbered from `now`.
  void move(std::uint64_t first, std::uint64_t count, std::uint64_t now) {
    while (next_ < from_.size() && from_[next_].access < first) ++next_;
    for (; next_ < from_.size() && from_[next_].access < first + count; ++next_)
      to_.push_back({from_[next_].access - first + now, from_[next_].begin, from_[next_].end});
  }

 private:
  const std::vector<Part>& from_;
  std::vector<Part>& to_;
  std::size_t next_ = 0;
};

}  // namespace

struct OpenOp {
  std::uint64_t recording = 0;
  std::uint64_t first_event = 0;  // the op's own events begin here
  std::vector<Access> inputs;
  std::size_t overwritten = 0, written = 0;  // counts of inputs
  std::vector<Access> made;
  Timers* timers = nullptr;  // of the op's device; null: it is not timed
  int timer = kNoTimer;
  int pause = kNoTimer;
  bool in_use = false;
};

std::atomic<bool> g_recording{false};

Recorder& recorder() {
  static auto* all = new Recorder;
  return *all;
}

void Recorder::start(Sink sink, const std::vector<LiveBlock>& live, bool by_events) {
  if (!any_on()) {
    clear();
    ++recording_;
    by_events_ = by_events;
    for (const LiveBlock& block : live)
      blocks_.put({block.address, block.bytes, 0, next_id_++, block.device, 0, block.tag,
                   block.family, false});
  }
  SinkState& state = sinks_[sink];
  state = {};
  state.on = true;
  state.next = first_event_ + events_.size();
  state.dropped_before = dropped_;
  blocks_.each([&](const Block& block) {
    state.before.push_back({EventKind::kAlloc, block.id, block.tag, block.family, block.bytes,
                            block.address, block.device});
  });
  std::sort(state.before.begin(), state.before.end(),
            [](const Event& a, const Event& b) { return a.id < b.id; });
  g_recording = true;
}

void Recorder::stop(Sink sink) {
  sinks_[sink] = {};
  if (any_on()) return trim();
  g_recording = false;
  clear();
  timers_.clear();
}

void Recorder::leave_to_parent() {
  sinks_ = {};
  g_recording = false;
  static_cast<void>(new auto(std::move(timers_)));
  timers_.clear();
}

void Recorder::clear() {
  events_.clear();
  accesses_.clear();
  parts_.clear();
  blocks_.clear();
  first_event_ = 1;  // 0: the blocks that were there before
  first_access_ = 0;
  next_id_ = 1;
  dropped_ = 0;
}

bool Recorder::current(const OpTimer& span) const {
  return span.open && span.open->recording == recording_ && any_on();
}

OpenOp* Recorder::open(OpTimer& span) {
  if (span.open) return span.open;
  if (spare_ops_.empty()) {
    ops_.push_back(std::make_unique<OpenOp>());
    spare_ops_.push_back(ops_.back().get());
  }
  OpenOp* op = spare_ops_.back();
  spare_ops_.pop_back();
  op->recording = recording_;
  op->first_event = first_event_ + events_.size();
  op->inputs.clear();
  op->made.clear();
  op->overwritten = op->written = 0;
  op->timers = nullptr;
  op->timer = op->pause = kNoTimer;
  op->in_use = true;
  return span.open = op;
}

void Recorder::close(OpTimer& span) {
  span.open->in_use = false;
  spare_ops_.push_back(span.open);
  span.open = nullptr;
}

Event* Recorder::event_at(std::uint64_t number) {
  if (number < first_event_ || number - first_event_ >= events_.size()) return nullptr;
  return &events_[number - first_event_];
}

Event* Recorder::log(Event event) {
  if (dropped_ > 0 || events_.size() >= kMaxEvents) {
    ++dropped_;
    return nullptr;
  }
  events_.push_back(event);
  return &events_.back();
}

// To the accesses, once a list, and only what is still alive.
void Recorder::add(const Used& used, std::uint32_t id, std::uint64_t list) {
  Block* block = blocks_.find(used.address);
  if (!block || block->id != id) return;
  const bool first = block->stamp != list;
  const std::size_t end = std::min(used.end, block->bytes);
  const bool in_part = end > used.begin && end - used.begin < block->bytes;
  if (first) {
    block->stamp = list;
    block->access = first_access_ + accesses_.size();
    block->in_part = in_part;
    accesses_.push_back(id);
  }
  if (in_part ? block->in_part : block->in_part && !first)
    parts_.push_back({block->access, in_part ? used.begin : 0, in_part ? end : block->bytes});
}

void Recorder::begin(OpTimer& span, const Used* inputs, std::size_t count, std::size_t overwritten,
                     std::size_t written) {
  if (!any_on()) return;
  OpenOp& op = *open(span);
  for (std::size_t i = 0; i < count; ++i) {
    if (i == overwritten) op.overwritten = op.inputs.size();
    if (i == written) op.written = op.inputs.size();
    if (const Block* block = blocks_.find(inputs[i].address))
      op.inputs.push_back({inputs[i], block->id});
  }
  if (overwritten >= count) op.overwritten = op.inputs.size();
  if (written >= count) op.written = op.inputs.size();
}

void Recorder::time(OpTimer& span, const driver::Table& table, const driver::Place& place,
                    cu::CUstream stream) {
  if (!by_events_ || !current(span)) return;
  std::shared_ptr<Timers>& timers = timers_[place.device];
  if (!timers) timers = std::make_shared<Timers>(table, place);
  span.open->timers = timers.get();
  span.open->timer = start(*timers, stream);
}

int Recorder::start(Timers& timers, cu::CUstream stream) {
  if (timers.full()) resolve();  // a step may have more ops than there are pairs
  return timers.start(stream);
}

void Recorder::pause(OpTimer& span, cu::CUstream stream) {
  if (!current(span) || span.open->timer == kNoTimer) return;
  OpenOp& op = *span.open;
  op.pause = start(*op.timers, stream);
  if (op.pause == kNoTimer) op.timers->spoil(op.timer);
}

void Recorder::resume(OpTimer& span, cu::CUstream stream) {
  if (!current(span) || span.open->pause == kNoTimer) return;
  OpenOp& op = *span.open;
  // Like an inner op, but no event of the log gets this time.
  op.timers->stop(std::exchange(op.pause, kNoTimer), stream, Timers::kNoEvent, op.timer);
}

void Recorder::alloc(std::uintptr_t address, std::size_t bytes, const char* tag, const char* family,
                     int device, OpTimer* maker) {
  if (!any_on()) return;
  const std::uint32_t id = next_id_++;
  const std::uint64_t number = first_event_ + events_.size();
  const bool made = maker && maker->entered_ns != 0;
  if (made) {
    OpenOp& op = *open(*maker);
    if (op.recording == recording_) op.made.push_back({{address}, id});
  }
  blocks_.put({address, bytes, number, id, device, 0, tag, family, made});
  Event event{EventKind::kAlloc, id, tag, family, bytes, address, device};
  event.helper = helps_only();
  log(event);
}

void Recorder::free(std::uintptr_t address) {
  const Block* block = blocks_.find(address);
  if (!block) return;
  log({EventKind::kFree, block->id});
  blocks_.erase(address);
}

void Recorder::rename(const Block& block) {
  const auto change = [&](Event& event) {
    event.name = block.tag;
    event.family = block.family;
  };
  Event* event = event_at(block.event);
  if (event && event->kind == EventKind::kAlloc && event->id == block.id) change(*event);
  for (SinkState& sink : sinks_) {
    const auto found = std::lower_bound(sink.before.begin(), sink.before.end(), block.id,
                                        [](const Event& e, std::uint32_t id) { return e.id < id; });
    if (found != sink.before.end() && found->id == block.id) change(*found);
  }
}

void Recorder::tag(std::uintptr_t address, const char* tag) {
  Block* block = blocks_.find(address);
  if (!block) return;
  block->tag = tag;
  block->provisional = false;
  rename(*block);
}

void Recorder::timed(OpTimer& span, cu::CUstream stream, OpTimer* parent) {
  if (!current(span)) return;
  const OpenOp* around = parent && current(*parent) ? parent->open : nullptr;
  OpenOp& op = *span.open;
  if (op.timer == kNoTimer) {
    if (around && around->timers) around->timers->spoil(around->timer);
    return;
  }
  // An op on another device does not count in the time of the enclosing op.
  const int above = around && around->timers == op.timers ? around->timer : kNoTimer;
  // The op's event is the next one: between this and `end` the lock is held.
  op.timers->stop(op.timer, stream, first_event_ + events_.size(), above);
  op.timer = kNoTimer;
}

void Recorder::end(OpTimer& span, const char* name, const char* tag, const char* family) {
  if (!span.open) return;
  OpenOp& op = *span.open;
  if (!current(span)) return close(span);
  Event event{EventKind::kOp, 0, name, family};
  event.helper = helps_only();
  event.us = by_events_ ? -1.f : static_cast<float>(static_cast<double>(span.self_ns) / 1e3);
  event.first = first_access_ + accesses_.size();
  const std::size_t size_before = accesses_.size();
  ++lists_;
  for (std::size_t i = op.overwritten; i < op.inputs.size(); ++i)
    add(op.inputs[i].used, op.inputs[i].id, lists_);
  const std::size_t writes_from = accesses_.size();
  ++lists_;
  for (std::size_t i = 0; i < op.written; ++i) add(op.inputs[i].used, op.inputs[i].id, lists_);
  for (const Access& made : op.made) {
    Block* block = blocks_.find(made.used.address);
    if (!block || block->id != made.id) continue;
    accesses_.push_back(made.id);
    if (tag && block->provisional) {
      block->tag = tag;
      block->family = family;
      rename(*block);
    }
    block->provisional = false;
  }
  event.reads = static_cast<std::uint32_t>(writes_from - size_before);
  event.writes = static_cast<std::uint32_t>(accesses_.size() - writes_from);
  const bool uses_any = event.reads + event.writes > 0;
  if (!uses_any || !log(event)) {
    accesses_.resize(size_before);
    while (!parts_.empty() && parts_.back().access >= first_access_ + size_before)
      parts_.pop_back();
    if (op.timers) op.timers->disown(first_event_ + events_.size());
  }
  close(span);
}

void Recorder::step() {
  if (any_on()) log({EventKind::kStep});
}

// The timers keep the events alive.
std::function<void()> Recorder::times() {
  std::vector<std::pair<std::shared_ptr<Timers>, std::vector<cu::CUevent>>> all;
  for (const auto& [device, timers] : timers_) all.emplace_back(timers, timers->ended());
  return [all = std::move(all)] {
    for (const auto& [timers, events] : all) timers->wait(events);
  };
}

void Recorder::resolve() {
  for (const auto& [device, timers] : timers_)
    timers->resolve([this](std::uint64_t number, float us) {
      Event* event = event_at(number);
      if (event && event->kind == EventKind::kOp) event->us = us;
    });
}

// Number of the first event that may still change.
std::uint64_t Recorder::settled() const {
  std::uint64_t first = first_event_ + events_.size();
  for (const auto& op : ops_)
    if (op->in_use && op->recording == recording_) first = std::min(first, op->first_event);
  for (const auto& [device, timers] : timers_) first = std::min(first, timers->first_open(first));
  return first;
}

std::size_t Recorder::waiting(Sink sink) const {
  const std::uint64_t end = first_event_ + events_.size();
  return sinks_[sink].on ? static_cast<std::size_t>(end - sinks_[sink].next) : 0;
}

Batch Recorder::take(Sink sink, bool all) {
  SinkState& state = sinks_[sink];
  Batch batch;
  if (!state.on) return batch;
  resolve();
  const std::uint64_t end = all ? first_event_ + events_.size() : settled();
  batch.events = std::exchange(state.before, {});
  const auto at = [&](std::uint64_t number) {
    return events_.begin() + static_cast<std::ptrdiff_t>(number - first_event_);
  };
  const std::size_t copied = batch.before = batch.events.size();
  if (end > state.next) batch.events.insert(batch.events.end(), at(state.next), at(end));
  state.next = std::max(state.next, end);
  PartMover parts(parts_, batch.parts);
  for (std::size_t i = copied; i < batch.events.size(); ++i) {
    Event& event = batch.events[i];
    if (event.kind != EventKind::kOp) continue;
    const std::size_t from = event.first - first_access_;
    parts.move(event.first, event.reads + event.writes, batch.accesses.size());
    event.first = batch.accesses.size();
    const auto ids = accesses_.begin() + static_cast<std::ptrdiff_t>(from);
    batch.accesses.insert(batch.accesses.end(), ids, ids + event.reads + event.writes);
  }
  if (sink == kPlan) leave_out_helpers(state, batch);
  if (by_events_) fill_times(batch.events);
  batch.dropped = dropped_ - state.dropped_before;
  trim();
  return batch;
}

// A plan covers events in the same order in each step. Blocks allocated by helpers count as if they
// were allocated at the first use by one of the program's own ops.
void Recorder::leave_out_helpers(SinkState& state, Batch& batch) const {
  std::vector<Event> kept(batch.events.begin(),
                          batch.events.begin() + static_cast<std::ptrdiff_t>(batch.before));
  std::vector<std::uint32_t> accesses;  // in the order of the ops, without gaps
  std::vector<Part> parts;
  PartMover mover(batch.parts, parts);
  for (std::size_t i = batch.before; i < batch.events.size(); ++i) {
    Event event = batch.events[i];
    if (event.kind == EventKind::kAlloc && event.helper) {
      state.from_helpers.emplace(event.id, event);
      continue;
    }
    if (event.kind == EventKind::kFree && state.from_helpers.erase(event.id) > 0) continue;
    if (event.kind == EventKind::kOp) {
      if (event.helper) continue;
      const std::uint64_t first = std::exchange(event.first, accesses.size());
      mover.move(first, event.reads + event.writes, event.first);
      const auto used = batch.accesses.begin() + static_cast<std::ptrdiff_t>(first);
      const auto writes = used + event.reads, end = writes + event.writes;
      accesses.insert(accesses.end(), used, end);
      const auto claim = [&](std::uint32_t id) {
        const auto found = state.from_helpers.find(id);
        if (found == state.from_helpers.end()) return;
        kept.push_back(found->second);
        state.from_helpers.erase(found);
      };
      // In the order of the op's inputs, as the plan's own reckoning (policy/planned.cpp): what
      // it writes comes first.
      std::for_each(writes, end, claim);
      std::for_each(used, writes, claim);
    }
    kept.push_back(event);
  }
  batch.events = std::move(kept);
  batch.accesses = std::move(accesses);
  batch.parts = std::move(parts);
}

// Forgets what every sink has.
void Recorder::trim() {
  std::uint64_t keep = first_event_ + events_.size();
  for (const SinkState& sink : sinks_)
    if (sink.on) keep = std::min(keep, sink.next);
  const auto count = static_cast<std::ptrdiff_t>(keep - first_event_);
  if (count == 0) return;
  std::uint64_t accesses = first_access_ + accesses_.size();
  for (std::size_t i = static_cast<std::size_t>(count); i < events_.size(); ++i) {
    if (events_[i].kind != EventKind::kOp) continue;
    accesses = events_[i].first;
    break;
  }
  events_.erase(events_.begin(), events_.begin() + count);
  accesses_.erase(accesses_.begin(),
                  accesses_.begin() + static_cast<std::ptrdiff_t>(accesses - first_access_));
  std::erase_if(parts_, [&](const Part& part) { return part.access < accesses; });
  first_event_ = keep;
  first_access_ = accesses;
}

}  // namespace umem::trace
