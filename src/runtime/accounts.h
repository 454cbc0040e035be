// A device's memory as a framework's allocator accounts for it: counters, a map of blocks, events.
// Plain data, like alloc.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "arena/stats.h"
#include "base/export.h"
#include "runtime/failure.h"

namespace umem::runtime {

// Zeros for a device that has served nothing yet.
UMEM_API arena::ArenaStats arena_stats(int device) noexcept;
// The same without waiting, for a deleter; false if another thread holds the device's lock.
UMEM_API bool try_arena_stats(int device, arena::ArenaStats* stats) noexcept;
UMEM_API void reset_peak_arena_stats(int device) noexcept;
UMEM_API void reset_accumulated_arena_stats(int device) noexcept;

// The ranges of one device with the blocks in them, both by address. A free block is neither active
// nor allocated; one that other streams still use is active.
UMEM_API std::vector<arena::SegmentRow> segments(int device);
// Returns the base of the range that contains `ptr`, and sets `bytes` to its size. Null: the
// address is not umem's.
UMEM_API void* base_of(const void* ptr, std::size_t* bytes) noexcept;

// Null: no listener.
UMEM_API void set_listener(arena::Listener listener) noexcept;

// Bytes that could be handed out on the device without evicting anything.
UMEM_API std::size_t available_bytes(int device) noexcept;
// 0 while the budget is still to be found at the device's first use.
UMEM_API std::size_t budget(int device) noexcept;
// Sets the budget of one device, until one is set for all devices; the host budget is unchanged.
UMEM_API bool set_budget(int device, std::size_t bytes, Failure* error) noexcept;
// Device bytes that the framework holds beside umem (graph pools) count towards the budget too.
UMEM_API void set_outside_bytes(int device, std::size_t bytes) noexcept;
// The same, for memory that the framework needs now and found too little for: waits until what has
// to leave has left the device, and returns cached memory. False during a capture of a graph.
UMEM_API bool make_way(int device, std::size_t outside_bytes) noexcept;
// The sizes of cuBLAS's workspaces. Blocks of these sizes that a matrix product leaves behind, and
// that no op names afterwards, stay on the device.
UMEM_API void set_workspace_sizes(const std::size_t* sizes, std::size_t count) noexcept;
// The part of a device's memory that `device=cuda:SIZE` leaves to the process.
UMEM_API std::size_t usable_bytes(std::size_t total_bytes) noexcept;
// The fraction of each device's memory that the framework may use: an upper bound of every budget
// that is found at a device's first use.
UMEM_API void set_memory_fraction(double fraction) noexcept;
// Returns cached memory of all devices to the driver.
UMEM_API void release_cached() noexcept;

// False if captured work would use memory that moves unseen by it: mapped memory.
UMEM_API bool serves_graphs() noexcept;
// Between the two calls (they nest, across threads) a stream may be capturing a graph, so umem
// makes no driver call that would break a capture.
UMEM_API void capture_begin() noexcept;
UMEM_API void capture_end() noexcept;
UMEM_API bool any_captures() noexcept;

}  // namespace umem::runtime
