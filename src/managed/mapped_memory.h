// Memory of a GPU that leaves it by copies, at addresses that stay: device memory is mapped there
// while the bytes are on the device (cuMemMap), and host memory where they are used on the host.
// The copies use nearly the link's rate, which the driver's moves of managed memory do not
// (docs/decisions/0027).
//
// There are no page faults. The address of bytes that are away is mapped to nothing, and an access
// there fails; an access while they move fails, or is lost. So the caller brings in, or maps, what
// is used, and orders each move after all uses.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "driver/table.h"
#include "managed/memory_ops.h"

namespace umem::managed {

// Thread-safe, but no two calls move the same bytes at once. Spans are those of units: the bytes
// that one call placed, another one moves whole. The device's context is current.
class MappedMemory {
 public:
  explicit MappedMemory(const driver::Table& table) : table_(table) {}
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  // kNotSupported, with the reason, if the device's driver cannot map memory so.
  static Status check_support(const driver::Table& table, int device);

  // Addresses of whole pages, aligned to pages, without memory.
  Result<cu::CUdeviceptr> reserve(std::size_t bytes, int device);
  // Waits for the device, as cuMemFree does.
  Status free(std::uintptr_t base);

  // Each acts at once: its caller has waited for the work that uses the bytes.

  // Maps device memory; contents are copied on the stream. If the device has no more memory, the
  // bytes are usable on the host (kOutOfDeviceMemory).
  Status bring_in(MemSpan span, cu::CUstream stream);
  // The same without contents.
  Status populate(MemSpan span);
  // Copies contents to the host, and gives device memory back.
  Status send_out(MemSpan span, cu::CUstream stream);
  // Makes bytes that are away usable on the host.
  Status use_on_host(MemSpan span);
  // Maps device memory for bytes that several units use in turn: none of them moves before `part`.
  // Unlike `populate` it never maps host memory (kOutOfDeviceMemory).
  Status place(MemSpan span);
  // Ends that: copies the units to the host, each as bytes that are away, and gives the device
  // memory back. On failure nothing has changed.
  Status part(MemSpan placed, const std::vector<MemSpan>& units);
  // Gives device memory back; the bytes have no contents.
  Status discard(MemSpan span);
  // True if memory is mapped at some of these addresses.
  bool holds(MemSpan span);

 private:
  using Handle = cu::CUmemGenericAllocationHandle;
  enum class At : unsigned char {
    kNowhere,
    kDevice,
    kAway,  // its contents are on the host, and no memory is mapped
    kHost,  // they are used there
  };
  struct Host {
    Handle memory = 0;
    cu::CUdeviceptr alias = 0;  // where it is always mapped, for copies
  };
  struct Chunk {
    std::size_t bytes = 0;
    int device = 0;
    At at = At::kNowhere;
    Handle memory = 0;  // of the device
    Host host;          // kept until the chunk is dissolved
  };
  struct Reserved {
    std::size_t bytes;
    int device;
  };
  using Chunks = std::map<std::uintptr_t, Chunk>;

  // These require the lock.
  Result<Chunks::iterator> find_locked(MemSpan span, bool keep_contents);
  Status dissolve(Chunks::iterator chunk);
  Status keep_spare(std::size_t bytes, Host host);
  Status release_spare(std::size_t most);
  Status release(std::size_t bytes, const Host& host);

  // These take it where they need it. The driver's calls on a chunk need none: no other call uses
  // the chunk meanwhile, and the map keeps it in its place.
  Result<Chunks::iterator> find(MemSpan span, bool keep_contents = true);
  std::vector<Chunks::iterator> all_in(MemSpan span);
  Status map(std::uintptr_t base, const Chunk& chunk, Handle memory);
  Status unmap(std::uintptr_t base, Chunk& chunk, At then);
  Status give_back(Chunk& chunk);
  Status map_device(std::uintptr_t base, Chunk& chunk);
  Status map_host(std::uintptr_t base, Chunk& chunk);
  Status map_device_or_host(std::uintptr_t base, Chunk& chunk, At then);
  Status take_host(Chunk& chunk);
  Status copy_out(std::uintptr_t base, Chunk& chunk, cu::CUstream stream);
  cu::CUresult create_host(const Chunk& chunk, Handle& memory);
  Status make_host(const Chunk& chunk, Host& host);

  const driver::Table& table_;
  std::mutex mutex_;  // guards the members below
  std::map<std::uintptr_t, Reserved> reserved_;
  Chunks chunks_;
  std::multimap<std::size_t, Host> spare_;  // by size
  std::size_t spare_bytes_ = 0;
};

}  // namespace umem::managed
