// The times of a lane's transfers, for profilers: measured by driver events, or by the host's clock
// on the software device, where the calls do the work.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "driver/place.h"
#include "driver/table.h"

namespace umem::engine {

enum class Verb : unsigned char {
  kBringIn,        // host -> device
  kPopulate,       // on the device without a copy: the bytes are dead
  kPopulateFresh,  // the same for addresses that never had contents: there is nothing to discard
  kDiscard,        // drop dead bytes
  kSendOut,        // device -> host
  kDrop,           // the same for read-mostly spans, without a transfer if the host's copy is valid
  kWriteBack,      // device -> host, and stays: the spans are read-mostly from now on
  kUseOnHost,      // mapped memory: make bytes usable that are away
};

// For messages.
const char* name(Verb verb);

struct Transfer {
  Verb verb = Verb::kBringIn;
  std::size_t bytes = 0;
  std::int64_t begin_ns = 0, end_ns = 0;  // since 1970
};

class LaneLog {
 public:
  static constexpr std::size_t kMost = std::size_t{1} << 16;  // max entries

  LaneLog(const driver::Table& table, driver::Place place) : table_(table), place_(place) {}

  // Clears the log and starts it. Does not wait for the device.
  Status start();
  // Ends the log. Transfers that are unfinished are not in it. `left_out` counts those beyond
  // kMost.
  std::vector<Transfer> take(std::size_t& left_out);

  // A submission of the lane, from construction to destruction.
  class Entry {
   public:
    Entry(LaneLog& log, Verb verb, std::size_t bytes, cu::CUstream stream);
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    LaneLog& log_;
    cu::CUstream stream_;
    std::uint64_t start_ = 0;  // its log's number; 0: none
    std::size_t at_ = 0;
  };

 private:
  struct Logged {
    Transfer transfer;
    cu::CUevent begin = nullptr, end = nullptr;
  };

  // The log between `start` and `take`.
  struct Log {
    std::vector<Logged> logged;
    std::size_t left_out = 0;
    cu::CUevent base = nullptr;  // at base_ns
    std::int64_t base_ns = 0;
  };

  cu::CUevent mark(cu::CUstream stream) const;
  bool timed(const Log& log, Logged& logged) const;
  void clear(const Log& log) const;

  const driver::Table& table_;
  const driver::Place place_;
  std::atomic<bool> on_{false};
  std::mutex mutex_;  // guards the members below
  std::uint64_t starts_ = 0;
  Log current_;
};

}  // namespace umem::engine
