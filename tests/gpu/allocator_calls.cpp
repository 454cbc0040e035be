// Calls of torch's CUDA allocator interface for which torch has no Python function.
#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>

#include "torch_ext/cuda/torch_version.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace caching = c10::cuda::CUDACachingAllocator;

namespace {
std::atomic<long> g_rejections{0};
std::atomic<long> g_blocks{0}, g_segments{0};  // reported to the tracker
}  // namespace

// Another library that wants to serve CUDA memory.
EXPORT void register_another() {
  c10::SetAllocator(c10::kCUDA, c10::GetAllocator(c10::kCPU), 9);
}

// As NCCL's process group does.
EXPORT void track() {
  caching::attachAllocatorTraceTracker([](const caching::TraceEntry& entry) {
    g_blocks += entry.action_ == caching::TraceEntry::ALLOC;
    g_segments += entry.action_ == caching::TraceEntry::SEGMENT_ALLOC ||
                  entry.action_ == caching::TraceEntry::SEGMENT_FREE;
  });
}
EXPORT long tracked_blocks() {
  return g_blocks;
}
EXPORT long tracked_segments() {
  return g_segments;
}

#if UMEM_TORCH_AT_LEAST(2, 12)
EXPORT bool has_context(const void* ptr) {
  return caching::getContextForPointer(ptr) != nullptr;
}
EXPORT void count_rejections() {
  caching::attachOomRejectionObserver(
      [](std::int64_t, std::size_t, std::size_t, std::size_t) { ++g_rejections; });
}
EXPORT long rejections() {
  return g_rejections;
}
#endif

#if UMEM_TORCH_AT_LEAST(2, 13)
// True if the block of that address is returned, and the current allocator frees it.
EXPORT bool allocates_at(std::size_t bytes, void* address) {
  const c10::DataPtr block = caching::allocateWithAddress(bytes, address);
  return block.get() == address && block.get_deleter() == caching::get()->raw_deleter();
}
#endif
