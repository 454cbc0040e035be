// When a lane worked on what it was given, for profilers: by events of the driver, or on the
// software device, where the calls do the work, by the host's clock.
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
  kPopulateFresh,  // the same of addresses that never had bytes: there is nothing to discard
  kDiscard,        // drop dead bytes
  kSendOut,        // device -> host
  kDrop,           // the same of read-mostly spans, without a transfer if the host's copy is valid
  kWriteBack,      // device -> host, and stays: the spans are read-mostly from here on
};

// For people.
const char* name(Verb verb);

struct Transfer {
  Verb verb = Verb::kBringIn;
  std::size_t bytes = 0;
  std::int64_t begin_ns = 0, end_ns = 0;  // since 1970
};

class LaneLog {
 public:
  static constexpr std::size_t kMost = std::size_t{1} << 16;  // kept

  LaneLog(const driver::Table& table, driver::Place place) : table_(table), place_(place) {}

  // Forgets what is logged, and logs from now on. Waits for nothing that the device is to do.
  Status start();
  // Ends the log. What the device has not done by now is not in it; nor is, but in `left_out`, what
  // came after kMost.
  std::vector<Transfer> take(std::size_t& left_out);

  // A submission of the lane's, from its construction to its end.
  class Entry {
   public:
    Entry(LaneLog& log, Verb verb, std::size_t bytes, cu::CUstream stream);
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    LaneLog& log_;
    cu::CUstream stream_;
    std::uint64_t start_ = 0;  // of the log that it is in; 0: none
    std::size_t at_ = 0;
  };

 private:
  struct Logged {
    Transfer transfer;
    cu::CUevent begin = nullptr, end = nullptr;
  };

  // What a start begins, and a take ends.
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
  std::mutex mutex_;  // of all below
  std::uint64_t starts_ = 0;
  Log current_;
};

}  // namespace umem::engine
