#include "torch_ext/cuda/history.h"

#include <algorithm>

#include "runtime/accounts.h"
#include "torch_ext/cuda/torch_version.h"

namespace umem::torch_ext {
namespace {

using arena::EventKind;
using Action = History::Entry::Action;

// The runtime's listener is a plain function: there is one allocator, hence one history.
std::atomic<History*> g_history{nullptr};
thread_local History::Context t_context;
thread_local std::vector<std::string> t_compile_contexts;
thread_local std::string t_user_metadata;

Action action_of(EventKind kind) {
  switch (kind) {
    case EventKind::kAlloc:
      return Action::ALLOC;
    case EventKind::kFreeRequested:
      return Action::FREE_REQUESTED;
    case EventKind::kFreeCompleted:
      return Action::FREE_COMPLETED;
    case EventKind::kSegmentAlloc:
      return Action::SEGMENT_ALLOC;
    case EventKind::kSegmentFree:
      return Action::SEGMENT_FREE;
    case EventKind::kOutOfMemory:
      return Action::OOM;
  }
  return Action::SNAPSHOT;
}

}  // namespace

thread_local arena::Event History::t_last{EventKind::kAlloc, 0, 0, 0, 0, 0};
constinit thread_local std::uintptr_t History::t_freed = 0;

void History::enter() {
  if (const Recorder recorder = recorder_.load()) t_context = recorder();
}

void History::leave() {
  t_context.reset();
}

void History::record(bool enabled, Recorder recorder, std::size_t max_entries, Level when,
                     bool clear, const std::vector<std::string>& skip_actions) {
  TORCH_CHECK(when == Level::NEVER || recorder, "recordHistory: stacks need a recorder");
  std::vector<Action> skipped;
  for (const std::string& name : skip_actions)
    skipped.push_back(c10::CachingDeviceAllocator::parseTraceEntryAction(name));
  std::lock_guard control(control_);
  {
    std::lock_guard guard(mutex_);
    if (enabled && !clock_) clock_.emplace();
    recorder_.store(recorder);
    max_entries_ = std::max<std::size_t>(max_entries, 1);
    skipped_ = std::move(skipped);
    if (!enabled || clear) traces_.clear();
    if (!enabled) {
      blocks_.clear();
      segments_.clear();
    }
  }
  level_.store(enabled ? static_cast<int>(when) : 0);
  recording_.store(enabled);
  listen();
}

void History::add_tracker(Tracker tracker) {
  std::lock_guard control(control_);
  {
    std::lock_guard guard(mutex_);
    trackers_.push_back(std::move(tracker));
  }
  tracked_ = true;
  listen();
}

void History::start_following() {
  std::lock_guard control(control_);
  follow_.store(true);
  listen();
}

void History::listen() {
  g_history.store(this);
  runtime::set_listener(recording() || tracked_ || follow_.load() ? &History::on_event : nullptr);
}

void History::on_event(const arena::Event& event) {
  // Ranges and other threads' blocks that leave meanwhile are not this thread's requests.
  if (event.kind == EventKind::kAlloc ||
      (event.kind == EventKind::kFreeRequested && event.address == t_freed))
    t_last = event;
  g_history.load()->handle(event);
}

void History::handle(const arena::Event& event) {
  // Known only to the allocator: how much is free, and whether it is tried once more.
  if (event.kind == EventKind::kOutOfMemory) return;
  std::lock_guard guard(mutex_);
  if (!recording() && trackers_.empty()) return;
  const bool freed =
      event.kind == EventKind::kFreeRequested || event.kind == EventKind::kFreeCompleted;
  if (freed && event.address != t_freed) {
    const auto found = blocks_.find(event.address);
    add_entry(action_of(event.kind), event.device, event.address, event.requested, event.stream,
              found == blocks_.end() ? nullptr : found->second.context, "");
  } else {
    add_entry(action_of(event.kind), event.device, event.address, event.requested, event.stream,
              t_context, t_user_metadata);
  }
  if (recording()) keep_live(event);
}

void History::keep_live(const arena::Event& event) {
  const Live live{t_context, event.device, event.bytes, event.stream};
  switch (event.kind) {
    case EventKind::kAlloc:
      blocks_[event.address] = live;
      break;
    case EventKind::kSegmentAlloc:
      segments_[event.address] = live;
      break;
    case EventKind::kFreeCompleted:
      blocks_.erase(event.address);
      break;
    case EventKind::kSegmentFree:
      segments_.erase(event.address);
      break;
    default:
      break;
  }
}

void History::add_entry(Action action, int device, std::size_t address, std::size_t bytes,
                        std::uintptr_t stream, const Context& context,
                        const std::string& metadata) {
  const bool with_stack = wants_stack(Level::ALLOC);
  Entry entry(action, static_cast<c10::DeviceIndex>(device), address, bytes,
              reinterpret_cast<void*>(stream), {0, 0}, c10::getApproximateTime(),
              with_stack ? context : nullptr,
              t_compile_contexts.empty() ? "" : t_compile_contexts.back(), metadata);
  // NCCL's process group registers each segment that its tracker hears of (with
  // TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK), and managed memory cannot be registered.
  if (action != Action::SEGMENT_ALLOC && action != Action::SEGMENT_FREE)
    for (const Tracker& tracker : trackers_) tracker(entry);
  const bool skipped = std::find(skipped_.begin(), skipped_.end(), action) != skipped_.end();
  if (!recording() || skipped) return;
  std::deque<Entry>& trace = traces_[device];
  trace.push_back(std::move(entry));
  while (trace.size() > max_entries_) trace.pop_front();
}

void History::out_of_memory(int device, std::size_t free_bytes, std::size_t bytes,
                            std::uintptr_t stream) {
  std::lock_guard guard(mutex_);
  if (recording() || !trackers_.empty())
    add_entry(Action::OOM, device, free_bytes, bytes, stream, t_context, t_user_metadata);
}

History::Context History::context_of(const void* ptr) {
  std::lock_guard guard(mutex_);
  const auto found = blocks_.find(reinterpret_cast<std::uintptr_t>(ptr));
  return found == blocks_.end() ? nullptr : found->second.context;
}

void History::annotate([[maybe_unused]] const void* ptr,
                       [[maybe_unused]] const std::string& metadata) {
#if UMEM_TORCH_AT_LEAST(2, 14)
  std::lock_guard guard(mutex_);
  const auto found = blocks_.find(reinterpret_cast<std::uintptr_t>(ptr));
  if (found == blocks_.end()) return;
  const Live& live = found->second;
  add_entry(Action::ANNOTATE, live.device, found->first, live.bytes, live.stream, t_context,
            metadata);
#endif
}

void History::set_user_metadata(const std::string& metadata) {
  t_user_metadata = metadata;
}

void History::push_compile_context(const std::string& context) {
  t_compile_contexts.push_back(context);
}

void History::pop_compile_context() {
  if (!t_compile_contexts.empty()) t_compile_contexts.pop_back();
}

}  // namespace umem::torch_ext
