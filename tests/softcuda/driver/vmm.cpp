#include "vmm.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "config.h"

namespace softcuda {
namespace {

constexpr int kPinned = 1;
constexpr int kHostMemory = -1;
constexpr int kNodes = 2;  // of NUMA; the devices are near node 0
constexpr unsigned kRead = 1, kReadWrite = 3;
constexpr int kPoison = 0xDB;  // new memory has undefined contents
constexpr int kReserveFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

// The file. Offsets are not used again: it is sparse.
struct File {
  int descriptor = memfd_create("softcuda", MFD_CLOEXEC);
  off_t next = 0;

  off_t extend(std::size_t bytes) {
    const off_t offset = next;
    const auto size = static_cast<off_t>(bytes);
    if (ftruncate(descriptor, offset + size) != 0) return -1;
    if (fallocate(descriptor, 0, offset, size) != 0) return -1;
    next += size;
    return offset;
  }
  void drop(off_t offset, std::size_t bytes) const {
    fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset,
              static_cast<off_t>(bytes));
  }
  bool show(std::uintptr_t at, std::size_t bytes, off_t offset, int protection) const {
    return mmap(reinterpret_cast<void*>(at), bytes, protection, MAP_SHARED | MAP_FIXED, descriptor,
                offset) != MAP_FAILED;
  }
};
File& file() {
  static auto* instance = new File;
  return *instance;
}

std::atomic<std::size_t> g_near_bytes{0};  // host memory of node 0

struct Memory {
  std::size_t bytes = 0;
  int device = kHostMemory;
  int node = -1;  // host memory's
  off_t offset = -1;
  CUdeviceptr frames = 0;  // device memory's, by their unused address
  bool counted = false;    // in g_near_bytes

  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (offset >= 0) file().drop(offset, bytes);
    if (counted) g_near_bytes -= bytes;
    if (frames == 0) return;
    remove_allocation(frames);
    soft().cuMemFree(frames);
  }
};

struct Mapping {
  std::shared_ptr<Memory> memory;
  std::array<unsigned, 2> devices{};  // their access
  unsigned host = 0;

  int protection() const {
    const unsigned all = devices[0] | devices[1] | host;
    return all == kReadWrite ? PROT_READ | PROT_WRITE : all == kRead ? PROT_READ : PROT_NONE;
  }
};
using Mappings = std::map<std::uintptr_t, Mapping>;

struct State {
  std::mutex mutex;
  std::map<std::uintptr_t, std::size_t> reservations;
  std::map<std::uint64_t, std::shared_ptr<Memory>> memories;
  Mappings mappings;
  std::uint64_t last_handle = 0;
};
State& state() {
  static auto* instance = new State;
  return *instance;
}

bool whole(std::uintptr_t at, std::size_t bytes) {
  return bytes != 0 && at % kGranularity == 0 && bytes % kGranularity == 0 && at + bytes > at;
}

// The reservation with that address, or the end.
auto reservation_of(std::uintptr_t address) {
  auto& all = state().reservations;
  const auto after = all.upper_bound(address);
  if (after == all.begin()) return all.end();
  const auto found = std::prev(after);
  return address - found->first < found->second ? found : all.end();
}

Mappings::iterator mapping_of(std::uintptr_t address) {
  auto& all = state().mappings;
  const auto after = all.upper_bound(address);
  if (after == all.begin()) return all.end();
  const auto found = std::prev(after);
  return address - found->first < found->second.memory->bytes ? found : all.end();
}

// Calls visit(mapping) for each mapping of [at, end), until one returns false or there is a gap.
template <class Visit>
bool each_mapped(std::uintptr_t at, std::uintptr_t end, Visit visit) {
  while (at < end) {
    const auto found = mapping_of(at);
    if (found == state().mappings.end() || !visit(found)) return false;
    at = found->first + found->second.memory->bytes;
  }
  return true;
}

bool covers_locked(std::uintptr_t at, std::size_t bytes) {
  if (!whole(at, bytes) || state().mappings.count(at) == 0) return false;
  std::uintptr_t end = at;
  return each_mapped(at, at + bytes,
                     [&](const Mappings::iterator& found) {
                       end = found->first + found->second.memory->bytes;
                       return true;
                     }) &&
         end == at + bytes;
}

CUresult check_grant(const AccessGrant& grant, const Mapping& mapping) {
  if (grant.flags != 0 && grant.flags != kRead && grant.flags != kReadWrite)
    return CUDA_ERROR_INVALID_VALUE;
  switch (grant.location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
      return valid_device(grant.location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:  // the CPU reaches only its own memory
      return mapping.memory->device == kHostMemory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

bool take_frames(Memory& memory) {
  if (memory.device == kHostMemory) {
    if (memory.node != 0) return true;
    if (memory.bytes + g_near_bytes > config().near_bytes) return false;
    g_near_bytes += memory.bytes;
    return memory.counted = true;
  }
  if (memory.bytes > config().bytes || make_room(memory.device, memory.bytes) < memory.bytes ||
      soft().cuMemAlloc(&memory.frames, memory.bytes) != CUDA_SUCCESS)
    return false;
  add_allocation({memory.frames, memory.bytes, Kind::kDevice, memory.device});
  return true;
}

bool fill_new(const Memory& memory) {
  void* window = mmap(nullptr, memory.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file().descriptor,
                      memory.offset);
  if (window == MAP_FAILED) return false;
  std::memset(window, kPoison, memory.bytes);
  munmap(window, memory.bytes);
  return true;
}

bool may_access(const Mapping& mapping, int device, Use use) {
  const unsigned access = mapping.devices[static_cast<std::size_t>(device)];
  return access == kReadWrite || (access == kRead && use == Use::kRead);
}

bool legal(const Access& access, int device) {
  for (const auto& [base, bytes] : state().reservations) {
    const std::uintptr_t begin = std::max(access.begin, base);
    const std::uintptr_t end = std::min(access.end, base + bytes);
    if (begin < end && !each_mapped(
                           begin, end,
                           [&](const Mappings::iterator& found) {
                             return may_access(found->second, device, access.use);
                           }))
      return false;
  }
  return true;
}

}  // namespace

CUresult check_properties(const MemoryProperties* properties) {
  if (!properties || properties->type != kPinned || properties->metadata || properties->usage != 0)
    return CUDA_ERROR_INVALID_VALUE;
  if (properties->handle_types != 0) return CUDA_ERROR_NOT_SUPPORTED;
  const CUmemLocation& location = properties->location;
  if (location.type == CU_MEM_LOCATION_TYPE_DEVICE)
    return valid_device(location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
  // As in CUDA 13.0: neither HOST nor HOST_NUMA_CURRENT.
  const bool numa =
      location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA && location.id >= 0 && location.id < kNodes;
  return numa ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult reserve_addresses(std::uintptr_t& at, std::size_t bytes, std::size_t alignment,
                           std::uintptr_t hint) {
  const bool power_of_two = (alignment & (alignment - 1)) == 0;
  if (!whole(0, bytes) || !power_of_two || bytes > std::size_t{1} << 46)
    return CUDA_ERROR_INVALID_VALUE;
  alignment = std::max(alignment, kGranularity);
  const std::lock_guard guard(state().mutex);
  if (hint != 0 && hint % alignment == 0 &&
      mmap(reinterpret_cast<void*>(hint), bytes, PROT_NONE, kReserveFlags | MAP_FIXED_NOREPLACE, -1,
           0) == reinterpret_cast<void*>(hint)) {
    at = hint;
  } else {
    void* block = mmap(nullptr, bytes + alignment, PROT_NONE, kReserveFlags, -1, 0);
    if (block == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    const auto begin = reinterpret_cast<std::uintptr_t>(block);
    at = (begin + alignment - 1) / alignment * alignment;
    if (at > begin) munmap(block, at - begin);
    munmap(reinterpret_cast<void*>(at + bytes), begin + alignment - at);
  }
  state().reservations[at] = bytes;
  return CUDA_SUCCESS;
}

CUresult free_addresses(std::uintptr_t at, std::size_t bytes) {
  const std::lock_guard guard(state().mutex);
  const auto found = state().reservations.find(at);
  if (found == state().reservations.end() || found->second != bytes)
    return CUDA_ERROR_INVALID_VALUE;
  const auto first = state().mappings.lower_bound(at);
  if (first != state().mappings.end() && first->first < at + bytes) return CUDA_ERROR_INVALID_VALUE;
  munmap(reinterpret_cast<void*>(at), bytes);
  state().reservations.erase(found);
  return CUDA_SUCCESS;
}

CUresult create_memory(std::uint64_t& handle, std::size_t bytes,
                       const MemoryProperties& properties) {
  if (!whole(0, bytes)) return CUDA_ERROR_INVALID_VALUE;
  auto memory = std::make_shared<Memory>();
  memory->bytes = bytes;
  if (properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE)
    memory->device = properties.location.id;
  else
    memory->node = properties.location.id;
  const std::lock_guard guard(state().mutex);
  if (!take_frames(*memory)) return CUDA_ERROR_OUT_OF_MEMORY;
  memory->offset = file().extend(bytes);
  if (memory->offset < 0 || !fill_new(*memory)) return CUDA_ERROR_OUT_OF_MEMORY;
  handle = ++state().last_handle;
  state().memories.emplace(handle, std::move(memory));
  return CUDA_SUCCESS;
}

CUresult release_memory(std::uint64_t handle) {
  const std::lock_guard guard(state().mutex);
  return state().memories.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult map_memory(std::uintptr_t at, std::size_t bytes, std::uint64_t handle) {
  const std::lock_guard guard(state().mutex);
  const auto found = state().memories.find(handle);
  const auto reserved = reservation_of(at);
  if (!whole(at, bytes) || found == state().memories.end() || found->second->bytes != bytes ||
      reserved == state().reservations.end() || bytes > reserved->first + reserved->second - at)
    return CUDA_ERROR_INVALID_VALUE;
  const auto next = state().mappings.lower_bound(at);
  const bool taken = next != state().mappings.end() && next->first < at + bytes;
  if (taken || mapping_of(at) != state().mappings.end()) return CUDA_ERROR_INVALID_VALUE;
  const std::shared_ptr<Memory>& memory = found->second;
  if (!file().show(at, bytes, memory->offset, PROT_NONE)) return CUDA_ERROR_OUT_OF_MEMORY;
  state().mappings[at].memory = memory;
  const bool host = memory->device == kHostMemory;
  add_allocation({at, bytes, host ? Kind::kHost : Kind::kDevice,
                  host ? std::max(0, current_device()) : memory->device, false, true});
  return CUDA_SUCCESS;
}

bool covers_mappings(std::uintptr_t at, std::size_t bytes) {
  const std::lock_guard guard(state().mutex);
  return covers_locked(at, bytes);
}

CUresult unmap_memory(std::uintptr_t at, std::size_t bytes) {
  const std::lock_guard guard(state().mutex);
  if (!covers_locked(at, bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, kReserveFlags | MAP_FIXED, -1, 0) ==
      MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  const auto first = state().mappings.find(at);
  const auto last = state().mappings.lower_bound(at + bytes);
  for (auto each = first; each != last; ++each) remove_allocation(each->first);
  state().mappings.erase(first, last);
  return CUDA_SUCCESS;
}

CUresult grant_access(std::uintptr_t at, std::size_t bytes, const AccessGrant* grants,
                      std::size_t count) {
  if (!grants || count == 0) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard guard(state().mutex);
  if (!covers_locked(at, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const auto first = state().mappings.find(at);
  const auto last = state().mappings.lower_bound(at + bytes);
  for (auto each = first; each != last; ++each)
    for (std::size_t i = 0; i < count; ++i)
      if (const CUresult result = check_grant(grants[i], each->second)) return result;
  for (auto each = first; each != last; ++each) {
    Mapping& mapping = each->second;
    for (std::size_t i = 0; i < count; ++i) {
      const bool device = grants[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE;
      (device ? mapping.devices[static_cast<std::size_t>(grants[i].location.id)] : mapping.host) =
          grants[i].flags;
    }
    if (mprotect(reinterpret_cast<void*>(each->first), mapping.memory->bytes,
                 mapping.protection()) != 0)
      return CUDA_ERROR_OUT_OF_MEMORY;
  }
  return CUDA_SUCCESS;
}

bool find_reservation(std::uintptr_t address, AddressRange& found) {
  const std::lock_guard guard(state().mutex);
  const auto reserved = reservation_of(address);
  if (reserved == state().reservations.end()) return false;
  found = {reserved->first, reserved->second};
  return true;
}

bool is_mapped(std::uintptr_t at, std::size_t bytes) {
  const std::lock_guard guard(state().mutex);
  return each_mapped(at, at + bytes, [](const Mappings::iterator&) { return true; });
}

bool touches_reserved(const Accesses& accesses) {
  const std::lock_guard guard(state().mutex);
  const auto& all = state().reservations;
  return std::any_of(accesses.begin(), accesses.end(), [&](const Access& access) {
    const auto next = all.lower_bound(access.end);
    return next != all.begin() && std::prev(next)->first + std::prev(next)->second > access.begin;
  });
}

const Access* find_illegal(const Accesses& accesses, int device) {
  const std::lock_guard guard(state().mutex);
  const auto found = std::find_if(accesses.begin(), accesses.end(), [device](const Access& access) {
    return !legal(access, device);
  });
  return found == accesses.end() ? nullptr : &*found;
}

}  // namespace softcuda
