// Blocks: the path of every tensor.
#include <c10/core/impl/GPUTrace.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Logging.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/format.h"
#include "runtime/accounts.h"
#include "runtime/alloc.h"
#include "torch_ext/cuda/cuda_allocator.h"
#include "torch_ext/failure.h"
#include "torch_ext/unlocked.h"

namespace umem::torch_ext {
namespace {

std::uintptr_t handle(cudaStream_t stream) {
  return reinterpret_cast<std::uintptr_t>(stream);
}

c10::DeviceIndex current_device() {
  c10::DeviceIndex device = 0;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  return device;
}

// Reports every block to torch's profiler and sanitizer, if active. A deleter does not wait for the
// figures: while another thread uses the device, it reports the last ones.
void report(void* ptr, int device, std::int64_t bytes) {
  static std::atomic<std::int64_t> allocated{0}, reserved{0};
  if (arena::ArenaStats now; runtime::try_arena_stats(device, &now)) {
    allocated = now.allocated_bytes[arena::kAll].current;
    reserved = now.reserved_bytes[arena::kAll].current;
  }
  c10::reportMemoryUsageToProfiler(ptr, bytes, static_cast<std::size_t>(allocated),
                                   static_cast<std::size_t>(reserved),
                                   c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
}

void report_alloc(void* ptr, bool profiled) {
  if (profiled) {
    const arena::Event& event = History::last_event();
    report(ptr, event.device, static_cast<std::int64_t>(event.bytes));
  }
  if (const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace())
    (*interpreter)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<std::uintptr_t>(ptr));
}

void report_free(void* ptr, bool profiled) {
  if (profiled) {
    const arena::Event& event = History::last_event();
    // Else another thread frees it, which was at the device: its bytes are not known here.
    const bool known = event.address == reinterpret_cast<std::uintptr_t>(ptr);
    report(ptr, event.device, known ? -static_cast<std::int64_t>(event.bytes) : 0);
  }
  if (const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace())
    (*interpreter)
        ->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<std::uintptr_t>(ptr));
}

}  // namespace

CudaAllocator& CudaAllocator::instance() {
  static auto* allocator = new CudaAllocator;
  return *allocator;
}

// Not for a private pool, and not if the program wants uncached memory.
bool CudaAllocator::serves(c10::DeviceIndex device, cudaStream_t stream) {
  if (C10_UNLIKELY(pools_.any())) {
    end_abandoned(false);
    if (pools_.claim(device, stream)) return false;
  }
  return C10_LIKELY(native_->isEnabled());
}

c10::DataPtr CudaAllocator::allocate(std::size_t bytes) {
  const c10::DeviceIndex device = current_device();
  const c10::Device on(c10::kCUDA, device);
  if (bytes == 0) return {nullptr, nullptr, &free_any, on};
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
  if (C10_LIKELY(serves(device, stream))) {
    void* ptr = take(bytes, device, stream);
    if (C10_LIKELY(ptr != nullptr)) return {ptr, ptr, &free_any, on};
  }
  c10::DataPtr block = beside(device, bytes, [&] { return native_->allocate(bytes); });
  adopt(block);
  return block;
}

#if UMEM_TORCH_AT_LEAST(2, 13)
// Addresses can be chosen in memory that torch's own allocator has cached for a private pool.
c10::DataPtr CudaAllocator::allocateWithAddress(std::size_t bytes, void* address) {
  c10::DataPtr block =
      beside(current_device(), bytes, [&] { return native_->allocateWithAddress(bytes, address); });
  adopt(block);
  return block;
}
#endif

// torch takes a block for the current allocator's if it has its deleter: the graph trees of
// torch.compile check.
void CudaAllocator::adopt(c10::DataPtr& block) {
  const bool swapped = block.compare_exchange_deleter(native_->raw_deleter(), &free_any);
  (void)swapped;  // not if it needs another one, such as a block made without caching
}

void* CudaAllocator::raw_alloc(std::size_t bytes) {
  return raw_alloc_with_stream(bytes, c10::cuda::getCurrentCUDAStream(current_device()).stream());
}

void* CudaAllocator::raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return nullptr;
  const c10::DeviceIndex device = current_device();
  if (C10_LIKELY(serves(device, stream))) {
    if (void* ptr = take(bytes, device, stream)) return ptr;
  }
  return beside(device, bytes, [&] { return native_->raw_alloc_with_stream(bytes, stream); });
}

// The result of `make`, a call that takes memory of torch's own allocator. If that finds too
// little, umem gives back what the budget does not allow beside it.
template <class Make>
auto CudaAllocator::beside(c10::DeviceIndex device, std::size_t bytes, Make make)
    -> decltype(make()) {
  std::optional<decltype(make())> made;
  try {
    made = make();
  } catch (const c10::OutOfMemoryError&) {
    if (!make_way(device, bytes)) {
      tell_outside_bytes(device);
      throw;
    }
  }
  if (!made) {
    try {
      made = make();
    } catch (...) {
      tell_outside_bytes(device);
      throw;
    }
  }
  tell_outside_bytes(device);
  return std::move(*made);
}

void* CudaAllocator::take(std::size_t bytes, c10::DeviceIndex device, cudaStream_t stream) {
  const bool profiled = c10::memoryProfilingEnabled();
  if (C10_UNLIKELY(profiled)) history_.follow();
  const History::Scope scope(history_, History::Level::STATE);
  runtime::Failure failure;
  void* ptr = runtime::allocate(bytes, device, handle(stream), &failure);
  if (C10_UNLIKELY(ptr == nullptr)) {
    if (is_turned_off(failure)) return nullptr;
    if (is_out_of_memory(failure)) ptr = take_after_callbacks(bytes, device, stream, failure);
    if (ptr == nullptr) fail(bytes, device, stream, failure);
  }
  report_alloc(ptr, profiled);
  return ptr;
}

// Libraries may register memory that they can release when memory is short.
void* CudaAllocator::take_after_callbacks(std::size_t bytes, c10::DeviceIndex device,
                                          cudaStream_t stream, runtime::Failure& failure) {
  bool freed = false;
  for (const std::string& key : c10::FreeCudaMemoryCallbacksRegistry()->Keys())
    freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(key)->Execute();
  return freed ? runtime::allocate(bytes, device, handle(stream), &failure) : nullptr;
}

// No lock is held: the observers run Python.
void CudaAllocator::fail(std::size_t bytes, c10::DeviceIndex device, cudaStream_t stream,
                         const runtime::Failure& failure) {
  std::size_t allocated = 0, reserved = 0;
  const std::string message = failure.message;  // an observer that allocates may fail too
  std::string torchs_words;
  if (is_out_of_memory(failure)) {
    const auto [free, total] = native_->getMemoryInfo(device);
    history_.out_of_memory(device, free, bytes, handle(stream));
    std::vector<caching::OutOfMemoryObserver> observers;
    {
      std::lock_guard guard(mutex_);
      observers = oom_observers_;
    }
    for (const auto& observer : observers) observer(device, bytes, total, free);
    torchs_words = "CUDA out of memory. Tried to allocate " + format_bytes(bytes) + ". GPU " +
                   std::to_string(device) + " has a total capacity of " + format_bytes(total) +
                   " of which " + format_bytes(free) + " is free.";
    const arena::ArenaStats now = runtime::arena_stats(device);
    allocated = static_cast<std::size_t>(now.allocated_bytes[arena::kAll].current);
    reserved = static_cast<std::size_t>(now.reserved_bytes[arena::kAll].current);
  }
  raise(bytes, {failure.code, message.c_str()}, c10::Device(c10::kCUDA, device), torchs_words,
        allocated, reserved);
}

// False where the block is not umem's.
bool CudaAllocator::release(void* ptr) {
  const bool profiled = c10::memoryProfilingEnabled();
  if (C10_UNLIKELY(profiled)) history_.follow();
  const History::Scope scope(history_, History::Level::ALL, ptr);
  if (C10_UNLIKELY(!runtime::release(ptr))) return false;
  report_free(ptr, profiled);
  return true;
}

// The deleter of both kinds of memory, and so one that must not throw.
void CudaAllocator::free_any(void* ptr) noexcept {
  if (ptr == nullptr) return;
  CudaAllocator& self = instance();
  try {
    if (C10_LIKELY(self.release(ptr)) || runtime::owns(ptr)) return;
    self.native_->raw_delete(ptr);
  } catch (const std::exception& error) {
    LOG(WARNING) << "umem: a block could not be freed: " << error.what();
  } catch (...) {
    LOG(WARNING) << "umem: a block could not be freed";
  }
}

c10::DeleterFnPtr CudaAllocator::raw_deleter() const {
  return &free_any;
}

void CudaAllocator::raw_delete(void* ptr) {
  free_any(ptr);
}

void CudaAllocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  native_->copy_data(to, from, bytes);
}

void CudaAllocator::recordStream(const c10::DataPtr& ptr, c10::cuda::CUDAStream stream) {
  if (!ptr.get() || runtime::record_stream(ptr.get(), handle(stream.stream()))) return;
  if (ptr.get_deleter() != &free_any) return native_->recordStream(ptr, stream);
  if (runtime::owns(ptr.get())) return;
  // The native allocator skips blocks without its deleter. Without a context this frees nothing.
  const c10::DataPtr block(ptr.get(), nullptr, native_->raw_deleter(), ptr.device());
  native_->recordStream(block, stream);
}

void* CudaAllocator::getBaseAllocation(void* ptr, std::size_t* bytes) {
  const Unlocked without_gil;
  std::size_t size = 0;
  void* base = runtime::base_of(ptr, &size);
  if (!base) return native_->getBaseAllocation(ptr, bytes);
  if (bytes) *bytes = size;
  return base;
}

void CudaAllocator::cacheInfo(c10::DeviceIndex device, std::size_t* largest) {
  const Unlocked without_gil;
  *largest = runtime::available_bytes(device);
  if (*largest == 0) native_->cacheInfo(device, largest);  // not used yet, or full
}

void CudaAllocator::emptyCache(c10::MempoolId_t id) {
  end_abandoned(false);
  if (id == c10::MempoolId_t{0, 0}) {
    const History::Scope scope(history_, History::Level::ALL);
    const Unlocked without_gil;
    runtime::release_cached();
  }
  native_->emptyCache(id);
  tell_outside_bytes();
}

caching::ShareableHandle CudaAllocator::shareIpcHandle(void* ptr) {
  TORCH_CHECK(!runtime::owns(ptr),
              "this CUDA tensor cannot be shared with another process: CUDA IPC does not work on "
              "umem's managed memory. Make the tensor inside `with "
              "torch.cuda.use_mem_pool(torch.cuda.MemPool()):`, which is plain device memory");
  return native_->shareIpcHandle(ptr);
}

}  // namespace umem::torch_ext
