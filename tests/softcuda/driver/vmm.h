// Virtual memory management: reserved addresses, memory with a handle, and its mappings.
//
// All memory is one sparse file, so that two mappings of one handle show the same bytes. Device
// memory also takes frames of the software device, which count as used and are not touched.
#pragma once
#include <cstddef>
#include <cstdint>

#include "devices.h"
#include "shadow.h"

namespace softcuda {

inline constexpr std::size_t kGranularity = std::size_t{2} << 20;

// CUmemAllocationProp and CUmemAccessDesc.
struct MemoryProperties {
  int type;
  int handle_types;
  CUmemLocation location;
  void* metadata;
  unsigned char compression, rdma;
  unsigned short usage;
  unsigned char reserved[4];
};
struct AccessGrant {
  CUmemLocation location;
  unsigned flags;
};

// The arguments of the entry points are checked here. Unmapping and mapping: with the work lock
// held, as work computes at these addresses.
CUresult check_properties(const MemoryProperties* properties);
CUresult reserve_addresses(std::uintptr_t& at, std::size_t bytes, std::size_t alignment,
                           std::uintptr_t hint);
CUresult free_addresses(std::uintptr_t at, std::size_t bytes);
CUresult create_memory(std::uint64_t& handle, std::size_t bytes,
                       const MemoryProperties& properties);
CUresult release_memory(std::uint64_t handle);
CUresult map_memory(std::uintptr_t at, std::size_t bytes, std::uint64_t handle);
// The range is whole mappings without gaps.
bool covers_mappings(std::uintptr_t at, std::size_t bytes);
CUresult unmap_memory(std::uintptr_t at, std::size_t bytes);
CUresult grant_access(std::uintptr_t at, std::size_t bytes, const AccessGrant* grants,
                      std::size_t count);

struct AddressRange {
  std::uintptr_t base = 0;
  std::size_t bytes = 0;
};
// False: nothing is reserved there.
bool find_reservation(std::uintptr_t address, AddressRange& found);
// Reserved addresses, all of which are mapped.
bool is_mapped(std::uintptr_t at, std::size_t bytes);
// Some of the bytes are at reserved addresses.
bool touches_reserved(const Accesses& accesses);
// An access that the device may not make; null if there is none.
const Access* find_illegal(const Accesses& accesses, int device);

}  // namespace softcuda
