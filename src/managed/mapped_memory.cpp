#include "managed/mapped_memory.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/units.h"
#include "driver/capabilities.h"

namespace umem::managed {

using driver::check;
using driver::Entry;

namespace {

// Making host memory takes 7 ms for 32 MiB: this much is kept for other units of the same size.
constexpr std::size_t kMostSpare = GiB;
constexpr int kMostNodes = 8;  // of NUMA, that are tried for host memory

cu::CUmemAllocationProp properties(cu::CUmemLocationType type, int id) {
  cu::CUmemAllocationProp made{};
  made.type = cu::CU_MEM_ALLOCATION_TYPE_PINNED;
  made.location = {type, id};
  return made;
}

}  // namespace

Status MappedMemory::check_support(const driver::Table& table, int device) {
  bool able = true;
  for (Entry entry :
       {Entry::cuMemAddressReserve, Entry::cuMemAddressFree, Entry::cuMemCreate,
        Entry::cuMemRelease, Entry::cuMemMap, Entry::cuMemUnmap, Entry::cuMemSetAccess})
    able = able && driver::supports(table, entry);
  for (cu::CUdevice_attribute attribute :
       {cu::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        cu::CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED}) {
    int value = 0;
    able = able && table.cuDeviceGetAttribute(&value, attribute, device) == cu::CUDA_SUCCESS &&
           value != 0;
  }
  if (able) return {};
  return {Code::kNotSupported,
          "the NVIDIA driver cannot map host memory at a device's addresses, which backing=mapped "
          "needs; use backing=managed, or update the driver"};
}

Result<cu::CUdeviceptr> MappedMemory::reserve(std::size_t bytes, int device) {
  cu::CUdeviceptr base = 0;
  UMEM_RETURN_IF_ERROR(check(table_.cuMemAddressReserve(&base, bytes, kPageBytes, 0, 0),
                             Entry::cuMemAddressReserve));
  const std::lock_guard guard(mutex_);
  reserved_[base] = {bytes, device};
  return base;
}

Status MappedMemory::free(std::uintptr_t base) {
  UMEM_RETURN_IF_ERROR(check(table_.cuCtxSynchronize(), Entry::cuCtxSynchronize));
  const std::lock_guard guard(mutex_);
  const auto reserved = reserved_.find(base);
  if (reserved == reserved_.end())
    return {Code::kInvalidArgument, "no addresses are reserved there"};
  const std::size_t bytes = reserved->second.bytes;
  for (auto chunk = chunks_.lower_bound(base);
       chunk != chunks_.end() && chunk->first < base + bytes;)
    UMEM_RETURN_IF_ERROR(dissolve(chunk++));
  UMEM_RETURN_IF_ERROR(check(table_.cuMemAddressFree(base, bytes), Entry::cuMemAddressFree));
  reserved_.erase(reserved);
  if (!reserved_.empty()) return {};
  const Status spare = release_spare(0);
  (void)spare;  // the range is free, and host memory that the driver refuses to take is lost
  return {};
}

Result<MappedMemory::Chunks::iterator> MappedMemory::find(MemSpan span, bool keep_contents) {
  const std::lock_guard guard(mutex_);
  return find_locked(span, keep_contents);
}

// The chunk of exactly these bytes, made if there is none. Other chunks there are dissolved: those
// of earlier units. kBadState if one has contents that are kept.
Result<MappedMemory::Chunks::iterator> MappedMemory::find_locked(MemSpan span, bool keep_contents) {
  const std::size_t bytes = align_up(span.bytes, kPageBytes);
  auto chunk = chunks_.upper_bound(span.base);
  if (chunk != chunks_.begin() &&
      std::prev(chunk)->first + std::prev(chunk)->second.bytes > span.base)
    --chunk;
  while (chunk != chunks_.end() && chunk->first < span.base + bytes) {
    const auto here = chunk++;
    if (here->first == span.base && here->second.bytes == bytes) return here;
    if (keep_contents && here->second.at != At::kNowhere)
      return Status(Code::kBadState, "memory is moved in other units than it was placed in");
    UMEM_RETURN_IF_ERROR(dissolve(here));
  }
  Chunk made;
  made.bytes = bytes;
  made.device = std::prev(reserved_.upper_bound(span.base))->second.device;
  return chunks_.emplace(span.base, made).first;
}

Status MappedMemory::dissolve(Chunks::iterator chunk) {
  UMEM_RETURN_IF_ERROR(unmap(chunk->first, chunk->second, At::kNowhere));
  if (chunk->second.host.memory != 0)
    UMEM_RETURN_IF_ERROR(keep_spare(chunk->second.bytes, std::exchange(chunk->second.host, {})));
  chunks_.erase(chunk);
  return {};
}

Status MappedMemory::map(std::uintptr_t base, const Chunk& chunk, Handle memory) {
  cu::CUresult mapped = table_.cuMemMap(base, chunk.bytes, 0, memory, 0);
  // An unmapping after an error may have failed as well.
  if (mapped != cu::CUDA_SUCCESS && table_.cuMemUnmap(base, chunk.bytes) == cu::CUDA_SUCCESS)
    mapped = table_.cuMemMap(base, chunk.bytes, 0, memory, 0);
  UMEM_RETURN_IF_ERROR(check(mapped, Entry::cuMemMap));
  const cu::CUmemAccessDesc access{{cu::CU_MEM_LOCATION_TYPE_DEVICE, chunk.device},
                                   cu::CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  Status status =
      check(table_.cuMemSetAccess(base, chunk.bytes, &access, 1), Entry::cuMemSetAccess);
  if (!status.ok()) (void)table_.cuMemUnmap(base, chunk.bytes);
  return status;
}

// No memory is mapped any more; device memory is given back. `then`: whether there are contents.
Status MappedMemory::unmap(std::uintptr_t base, Chunk& chunk, At then) {
  if (chunk.at == At::kDevice || chunk.at == At::kHost)
    UMEM_RETURN_IF_ERROR(check(table_.cuMemUnmap(base, chunk.bytes), Entry::cuMemUnmap));
  chunk.at = then;
  return give_back(chunk);
}

// Device memory that is no longer mapped. It remains the chunk's until the driver takes it back.
Status MappedMemory::give_back(Chunk& chunk) {
  if (chunk.memory == 0) return {};
  UMEM_RETURN_IF_ERROR(check(table_.cuMemRelease(chunk.memory), Entry::cuMemRelease));
  chunk.memory = 0;
  return {};
}

Status MappedMemory::map_device(std::uintptr_t base, Chunk& chunk) {
  const cu::CUmemAllocationProp device = properties(cu::CU_MEM_LOCATION_TYPE_DEVICE, chunk.device);
  Handle memory = 0;
  UMEM_RETURN_IF_ERROR(
      check(table_.cuMemCreate(&memory, chunk.bytes, &device, 0), Entry::cuMemCreate));
  if (Status status = map(base, chunk, memory); !status.ok()) {
    (void)table_.cuMemRelease(memory);
    return status;
  }
  chunk.memory = memory;
  chunk.at = At::kDevice;
  return {};
}

Status MappedMemory::map_host(std::uintptr_t base, Chunk& chunk) {
  UMEM_RETURN_IF_ERROR(take_host(chunk));
  UMEM_RETURN_IF_ERROR(map(base, chunk, chunk.host.memory));
  chunk.at = At::kHost;
  return {};
}

Status MappedMemory::take_host(Chunk& chunk) {
  if (chunk.host.memory != 0) return {};
  {
    const std::lock_guard guard(mutex_);
    if (const auto spare = spare_.find(chunk.bytes); spare != spare_.end()) {
      chunk.host = spare->second;
      spare_.erase(spare);
      spare_bytes_ -= chunk.bytes;
      return {};
    }
  }
  return make_host(chunk, chunk.host);
}

// Memory of the nearest NUMA node, or of another one if that has none or may not be used.
cu::CUresult MappedMemory::create_host(const Chunk& chunk, Handle& memory) {
  const auto create = [&](int node) {
    const cu::CUmemAllocationProp there = properties(cu::CU_MEM_LOCATION_TYPE_HOST_NUMA, node);
    return table_.cuMemCreate(&memory, chunk.bytes, &there, 0);
  };
  const int nearest = std::max(driver::nearest_host_node(table_, chunk.device), 0);
  const cu::CUresult created = create(nearest);
  if (created == cu::CUDA_SUCCESS) return created;
  bool full = created == cu::CUDA_ERROR_OUT_OF_MEMORY;
  for (int node = 0; node < kMostNodes; ++node) {
    const cu::CUresult other = node == nearest ? created : create(node);
    if (other == cu::CUDA_SUCCESS) return other;
    full = full || other == cu::CUDA_ERROR_OUT_OF_MEMORY;
  }
  return full ? cu::CUDA_ERROR_OUT_OF_MEMORY : created;
}

Status MappedMemory::make_host(const Chunk& chunk, Host& host) {
  Host made;
  cu::CUresult created = create_host(chunk, made.memory);
  if (created == cu::CUDA_ERROR_OUT_OF_MEMORY) {
    {
      const std::lock_guard guard(mutex_);
      UMEM_RETURN_IF_ERROR(release_spare(0));
    }
    created = create_host(chunk, made.memory);
  }
  if (created == cu::CUDA_ERROR_OUT_OF_MEMORY)
    return {Code::kOutOfHostMemory, "the host has no more memory that a GPU can use"};
  UMEM_RETURN_IF_ERROR(check(created, Entry::cuMemCreate));
  Status status = check(table_.cuMemAddressReserve(&made.alias, chunk.bytes, kPageBytes, 0, 0),
                        Entry::cuMemAddressReserve);
  if (status.ok()) {
    status = map(made.alias, chunk, made.memory);
    if (!status.ok()) (void)table_.cuMemAddressFree(made.alias, chunk.bytes);
  }
  if (!status.ok()) {
    (void)table_.cuMemRelease(made.memory);
    return status;
  }
  host = made;
  return {};
}

Status MappedMemory::keep_spare(std::size_t bytes, Host host) {
  spare_.emplace(bytes, host);
  spare_bytes_ += bytes;
  return release_spare(kMostSpare);
}

Status MappedMemory::release_spare(std::size_t most) {
  while (spare_bytes_ > most) {
    const auto largest = std::prev(spare_.end());
    const auto [size, released] = *largest;
    spare_.erase(largest);
    spare_bytes_ -= size;
    UMEM_RETURN_IF_ERROR(release(size, released));
  }
  return {};
}

Status MappedMemory::release(std::size_t bytes, const Host& host) {
  FirstError error;
  error.keep(check(table_.cuMemUnmap(host.alias, bytes), Entry::cuMemUnmap));
  error.keep(check(table_.cuMemAddressFree(host.alias, bytes), Entry::cuMemAddressFree));
  error.keep(check(table_.cuMemRelease(host.memory), Entry::cuMemRelease));
  return error.take();
}

Status MappedMemory::copy_out(std::uintptr_t base, Chunk& chunk, cu::CUstream stream) {
  UMEM_RETURN_IF_ERROR(take_host(chunk));
  return check(table_.cuMemcpyAsync(chunk.host.alias, base, chunk.bytes, stream),
               Entry::cuMemcpyAsync);
}

Status MappedMemory::map_device_or_host(std::uintptr_t base, Chunk& chunk, At then) {
  UMEM_RETURN_IF_ERROR(unmap(base, chunk, then));
  Status status = map_device(base, chunk);
  if (status.ok()) return {};
  Status mapped = map_host(base, chunk);
  return mapped.ok() ? std::move(status) : std::move(mapped);
}

Status MappedMemory::bring_in(MemSpan span, cu::CUstream stream) {
  Result<Chunks::iterator> found = find(span);
  if (!found.ok()) return found.take_status();
  auto& [base, chunk] = *found.value();
  if (chunk.at == At::kDevice) return {};
  const bool contents = chunk.at != At::kNowhere;
  UMEM_RETURN_IF_ERROR(map_device_or_host(base, chunk, contents ? At::kAway : At::kNowhere));
  if (!contents) return {};
  Status copied = check(table_.cuMemcpyAsync(base, chunk.host.alias, chunk.bytes, stream),
                        Entry::cuMemcpyAsync);
  if (copied.ok()) return {};
  UMEM_RETURN_IF_ERROR(unmap(base, chunk, At::kAway));
  return copied;
}

Status MappedMemory::populate(MemSpan span) {
  Result<Chunks::iterator> found = find(span, false);
  if (!found.ok()) return found.take_status();
  auto& [base, chunk] = *found.value();
  return chunk.at == At::kDevice ? Status() : map_device_or_host(base, chunk, At::kNowhere);
}

Status MappedMemory::send_out(MemSpan span, cu::CUstream stream) {
  Result<Chunks::iterator> found = find(span);
  if (!found.ok()) return found.take_status();
  auto& [base, chunk] = *found.value();
  if (chunk.at != At::kDevice) return give_back(chunk);
  UMEM_RETURN_IF_ERROR(copy_out(base, chunk, stream));
  UMEM_RETURN_IF_ERROR(check(table_.cuStreamSynchronize(stream), Entry::cuStreamSynchronize));
  return unmap(base, chunk, At::kAway);
}

Status MappedMemory::place(MemSpan span) {
  Result<Chunks::iterator> found = find(span, false);
  if (!found.ok()) return found.take_status();
  auto& [base, chunk] = *found.value();
  UMEM_RETURN_IF_ERROR(give_back(chunk));
  Status placed = map_device(base, chunk);
  const std::lock_guard guard(mutex_);
  if (!placed.ok()) chunks_.erase(found.value());
  return placed;
}

Status MappedMemory::part(MemSpan placed, const std::vector<MemSpan>& units) {
  Result<Chunks::iterator> found = find(placed);
  if (!found.ok()) return found.take_status();
  Chunk& joined = found.value()->second;
  Chunks parts;
  FirstError error;
  for (const MemSpan& unit : units) {
    Chunk& made = parts[unit.base];
    made.bytes = align_up(unit.bytes, kPageBytes);
    made.device = joined.device;
    made.at = At::kAway;
    error.keep(copy_out(unit.base, made, nullptr));
  }
  error.keep(check(table_.cuStreamSynchronize(nullptr), Entry::cuStreamSynchronize));
  Status copied = error.take();
  Status unmapped = copied.ok() ? unmap(placed.base, joined, At::kNowhere) : Status();
  const std::lock_guard guard(mutex_);
  if (joined.at == At::kDevice) {  // it was not unmapped
    for (auto& [base, made] : parts)
      if (made.host.memory != 0) error.keep(keep_spare(made.bytes, made.host));
    return copied.ok() ? std::move(unmapped) : std::move(copied);
  }
  if (parts.empty()) return {};                  // the next unit there dissolves it
  parts.begin()->second.memory = joined.memory;  // unless the driver has taken it back
  chunks_.erase(found.value());
  chunks_.merge(parts);
  return {};
}

Status MappedMemory::use_on_host(MemSpan span) {
  Result<Chunks::iterator> found = find(span);
  if (!found.ok()) return found.take_status();
  auto& [base, chunk] = *found.value();
  return chunk.at == At::kNowhere || chunk.at == At::kAway ? map_host(base, chunk) : Status();
}

// A chunk that ends later is of a larger block, which lived there before.
std::vector<MappedMemory::Chunks::iterator> MappedMemory::all_in(MemSpan span) {
  const std::uintptr_t end = span.base + align_up(span.bytes, kPageBytes);
  std::vector<Chunks::iterator> found;
  const std::lock_guard guard(mutex_);
  for (auto chunk = chunks_.lower_bound(span.base); chunk != chunks_.end() && chunk->first < end;
       ++chunk)
    found.push_back(chunk);
  return found;
}

Status MappedMemory::discard(MemSpan span) {
  FirstError error;
  for (const auto& chunk : all_in(span))
    error.keep(unmap(chunk->first, chunk->second, At::kNowhere));
  return error.take();
}

bool MappedMemory::holds(MemSpan span) {
  const std::vector<Chunks::iterator> chunks = all_in(span);
  return std::any_of(chunks.begin(), chunks.end(), [](const auto& chunk) {
    return chunk->second.at == At::kDevice || chunk->second.at == At::kHost;
  });
}

}  // namespace umem::managed
