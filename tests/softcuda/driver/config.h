// The environment's settings, read once. The software driver represents the machine, so they are
// not options of umem.
//   SOFTCUDA_DEVICES  1 or 2 (default 1)
//   SOFTCUDA_BYTES    memory of each device (default 256 MiB), whole 2 MiB frames
//   SOFTCUDA_SEED     0 (default): enqueued work runs at once; else later, in a random legal order
//   SOFTCUDA_HINTS    with a seed: worker (one carries them out, in the order of the calls),
//                     streams (work of their streams); default: worker for odd seeds
//   SOFTCUDA_VERSION  driver version (default 13000): newer entry points are not found
//   SOFTCUDA_MISSING  comma-separated entry points that this driver lacks
//   SOFTCUDA_NO_CMA   comma-separated devices without concurrentManagedAccess
//   SOFTCUDA_INTEGRATED  1: the devices' memory is the host's
//   SOFTCUDA_PAGE_CACHE  bytes that cuMemGetInfo counts as used and allocations get (default 0), as
//                     on an integrated device the host's page cache
//   SOFTCUDA_NEAR_BYTES  host memory of the NUMA node near the devices, for cuMemCreate (default:
//                     without limit); the other node has no limit
//   SOFTCUDA_FAIL     entry:nth:error,... planned failures
//   SOFTCUDA_FRAMES   kept (default): a page that leaves keeps its frame, as UVM has it; returned:
//                     it gives the frame back at once
//   SOFTCUDA_BATCH    frames that managed memory takes from the machine at a time (default: a 64th
//                     of the device, at most 64 of them, as UVM does)
//   SOFTCUDA_RACES    1 (default): races are looked for (races.h), and a process that has not asked
//   for
//                     those found exits with 70; 0: they are not
//   SOFTCUDA_LOG      1: say once on stderr which unsupported entry points are called
#pragma once
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

namespace softcuda {

enum class Hints { kBoth, kWorker, kStreams };

struct Config {
  int devices = 1;
  std::size_t bytes = std::size_t{256} << 20;
  std::uint64_t seed = 0;
  Hints hints = Hints::kBoth;
  int version = 13000;
  std::set<std::string> missing;
  std::set<std::string> no_cma;  // device numbers
  bool integrated = false;
  std::size_t page_cache = 0;
  std::size_t near_bytes = std::size_t{1} << 40;
  std::string fail;
  bool uvm = true;
  std::size_t batch_frames = 1;
  bool races = true;
  bool log = false;
};

const Config& config();
// Once for each `what`, if SOFTCUDA_LOG is set.
void log_once(const std::string& what);

}  // namespace softcuda
