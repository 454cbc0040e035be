// The software device: a device with a fixed number of 2 MiB frames, played by this machine's
// memory. Bytes really move, an absent page faults, and time is virtual.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/export.h"
#include "base/status.h"
#include "driver/table.h"
#include "soft/move_log.h"
#include "soft/page_state.h"
#include "soft/profiles.h"

namespace umem::soft {

struct Options {
  std::size_t device_bytes = 0;  // rounded down to whole frames; at least kMinFrames of them
  const Profile* profile = nullptr;
  // False: the same device in addresses and virtual time only; see `access`.
  bool backed = true;
  // True: frames and protections are the UVM driver's (open-gpu-kernel-modules 595.45.04). A page
  // that leaves keeps its frame until it is freed or no other frame is available (uvm_va_block.c,
  // block_clear_resident_processor), and pages on the device at the end of read-mostly are
  // read-only until they are prefetched or a write faults. False: a page that leaves returns its
  // frame, so that this machine's memory is not used twice.
  bool uvm = false;
  // A folder on a disk: evicted pages live there, in an unnamed file of at most `disk_bytes` (0: no
  // limit), and `staging_bytes` of frames more than the device's hold pages that are under way.
  std::string disk = {};
  std::size_t disk_bytes = 0, staging_bytes = 0;
};

// Once for the process, before the handlers of who calls the device under locks: handlers lock in
// the reverse order of their registration.
void register_fork_handlers();

// Opens this process's software device (there is one at a time) and fills `driver`.
// kBadState if one is open, kInvalidArgument if the folder cannot hold it, kNotSupported if the
// kernel lacks mremap(MREMAP_DONTUNMAP) (Linux 5.7).
UMEM_API Status open(const Options& options, driver::Driver& driver);
// kBadState while managed memory is allocated. Streams, events and contexts die with the device.
UMEM_API Status close();

// A kernel of `us` microseconds on `stream`, for the virtual clock.
UMEM_API void launch(cu::CUstream stream, double us);
// The memory accesses of a kernel on the default stream: an absent page faults, and so does a write
// to a page that is duplicated on the host. On a backed device the pages are really touched; on an
// unbacked one, where loads and stores crash, this is the only access. kInvalidArgument if bytes
// are not managed memory, kOutOfDeviceMemory if no frame is available.
struct Access {
  std::uintptr_t ptr = 0;
  std::size_t bytes = 0;
  bool write = false;
};
UMEM_API Status access(const Access* list, std::size_t count);

// When all that has been sent to the host so far has arrived there, in virtual time.
UMEM_API double arrived_us();
// The host works on evicted managed memory, such as an optimizer that updates a parameter there: at
// `ready_us` of virtual time or later, for `us` of its one lane. Among ready works the one with the
// least `due` runs first. Until it is over none of these bytes are fetched. kInvalidArgument if
// they are not managed memory on the host.
UMEM_API Status host_work(std::uintptr_t ptr, std::size_t bytes, double ready_us, double us,
                          double due);

// Starts recording the events of pages, and returns the log: src/soft/move_log.h. kNotSupported on
// a backed device, whose faults occur where no memory can be allocated.
UMEM_API Status log_moves();
UMEM_API Result<Moves> take_moves();
// Fills in when the host works on pages, which settles its turns up to there.
UMEM_API Status settle_host(std::vector<Move>& moves);

// The calling program waits for the default stream: host time becomes the stream's.
UMEM_API void wait();
// Virtual time in microseconds since `open`.
UMEM_API double now_us();

// Discarded pages read as 0xDB bytes, so that a test sees a read of dead data.
UMEM_API void set_poison(bool on);

// The location of each 2 MiB page of a range.
UMEM_API Result<std::vector<PageState>> page_states(std::uintptr_t ptr, std::size_t bytes);

}  // namespace umem::soft
