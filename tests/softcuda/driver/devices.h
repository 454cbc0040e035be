// The devices: one software device (src/soft) whose frames the devices share, each up to its own
// size, contexts, and the location of allocations.
#pragma once
#include <cstddef>
#include <cstdint>

#include "driver/table.h"
#include "driver/types.h"

namespace softcuda {

using namespace umem::cu;  // NOLINT: the driver's own vocabulary

inline constexpr CUresult kInvalidContext = CUDA_ERROR_INVALID_CONTEXT;

// CUDA_ERROR_NOT_INITIALIZED before cuInit and in a forked child of a process that called it.
CUresult initialize();
CUresult check_initialized();
// The entry points of src/soft.
const umem::driver::Table& soft();

// The calling thread's device by its current context; -1 without one.
int current_device();
void set_current_device(int device);  // -1: none
CUcontext context_of(int device);
int device_of(CUcontext context);  // -1 if it is not one of ours
int device_count();                // visible ones
bool valid_device(int device);
int retain(int device, int change);  // the primary context's new reference count

enum class Kind { kDevice, kManaged, kHost };
struct Allocation {
  std::uintptr_t base = 0;
  std::size_t bytes = 0;
  Kind kind = Kind::kDevice;
  int device = 0;
  bool registered = false;  // host memory of the program, not ours
  bool mapped = false;      // by cuMemMap
};
// All below take the devices' own lock. False / null result: no allocation contains the address.
bool find_allocation(std::uintptr_t address, Allocation& found);
void add_allocation(const Allocation& allocation);
void remove_allocation(std::uintptr_t base);
// [ptr, ptr + bytes) is inside one managed allocation and not empty.
bool is_managed(CUdeviceptr ptr, std::size_t bytes);
std::size_t used_bytes(int device);
// Frees up to `bytes` on a device by evicting its managed pages; returns how many of them are free
// now. With one device src/soft evicts by itself, and the result is `bytes`.
std::size_t make_room(int device, std::size_t bytes);
// After a prefetch of the range to `device`.
void set_home(CUdeviceptr ptr, std::size_t bytes, int device);

}  // namespace softcuda
