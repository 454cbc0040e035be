// The interface of torch's memory tools: snapshots, history, observers. Calls go to both
// allocators, so that results include private pools.
#include "runtime/alloc.h"
#include "torch_ext/cuda/cuda_allocator.h"
#include "torch_ext/unlocked.h"

namespace umem::torch_ext {

caching::SnapshotInfo CudaAllocator::snapshot(c10::MempoolId_t id, bool include_traces) {
  caching::SnapshotInfo result = native_->snapshot(id, include_traces);
  // None of umem's segments belongs to a private pool.
  const Unlocked without_gil;
  if (id == c10::MempoolId_t{0, 0}) history_.append_to(result, device_count(), include_traces);
  return result;
}

bool CudaAllocator::isHistoryEnabled() {
  return history_.recording();
}

void CudaAllocator::recordHistory(bool enabled, caching::CreateContextFn recorder,
                                  std::size_t max_entries, caching::RecordContext when, bool clear,
                                  const std::vector<std::string>& skip_actions) {
  native_->recordHistory(enabled, recorder, max_entries, when, clear, skip_actions);
  history_.record(enabled, recorder, max_entries, when, clear, skip_actions);
}

void CudaAllocator::recordAnnotation(
    const std::vector<std::pair<std::string, std::string>>& annotation) {
  native_->recordAnnotation(annotation);
}

void CudaAllocator::pushCompileContext(std::string& context) {
  native_->pushCompileContext(context);
  history_.push_compile_context(context);
}

void CudaAllocator::popCompileContext() {
  native_->popCompileContext();
  history_.pop_compile_context();
}

void CudaAllocator::setUserMetadata(const std::string& metadata) {
  native_->setUserMetadata(metadata);
  history_.set_user_metadata(metadata);
}

std::string CudaAllocator::getUserMetadata() {
  return native_->getUserMetadata();
}

void CudaAllocator::attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) {
  {
    std::lock_guard guard(mutex_);
    oom_observers_.push_back(observer);
  }
  native_->attachOutOfMemoryObserver(std::move(observer));
}

void CudaAllocator::attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) {
  history_.add_tracker(tracker);
  native_->attachAllocatorTraceTracker(std::move(tracker));
}

#if UMEM_TORCH_AT_LEAST(2, 12)
std::shared_ptr<c10::GatheredContext> CudaAllocator::getContextForPointer(const void* ptr) {
  if (runtime::owns(ptr)) return history_.context_of(ptr);
  return native_->getContextForPointer(ptr);
}
#endif

#if UMEM_TORCH_AT_LEAST(2, 14)
bool CudaAllocator::supportsUserMetadata() {
  return native_->supportsUserMetadata();
}

void CudaAllocator::annotateMemory(const void* ptr, const std::string& metadata) {
  if (!runtime::owns(ptr)) return native_->annotateMemory(ptr, metadata);
  const History::Scope scope(history_, History::Level::ALLOC);
  history_.annotate(ptr, metadata);
}
#endif

}  // namespace umem::torch_ext
