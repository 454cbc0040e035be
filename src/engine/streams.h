// The streams that ops run on, and events in them, so that a transfer waits for a unit's last use
// and not for all work that the program has enqueued since.
#pragma once
#include <cstdint>
#include <deque>
#include <vector>

#include "base/assert.h"
#include "base/status.h"
#include "driver/place.h"
#include "driver/table.h"

namespace umem::engine {

class Streams {
 public:
  Streams(const driver::Table& table, driver::Place place) : table_(table), place_(place) {}
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  Status close();

  // The stream's bit in a mask; streams beyond the 31st share the last one.
  std::uint32_t bit(cu::CUstream stream);
  // Ops up to ledger time `now` are enqueued on the stream. Records an event every few ops.
  Status mark(cu::CUstream stream, std::uint64_t now);
  // Appends an event for each stream of the mask that is reached after its uses up to ledger time
  // `used`. Records one (at time `now`) if there is none yet. A stream that refuses is skipped if
  // the order only affects speed: that of a move by the driver; else it is an error (`strict`).
  Status after(std::uint32_t mask, std::uint64_t used, std::uint64_t now,
               std::vector<cu::CUevent>& events, bool strict);
  // Appends an event that is reached after the stream's work up to ledger time `time`, or returns
  // an error, for example if the stream captures a graph.
  Status after_time(cu::CUstream stream, std::uint64_t time, std::uint64_t now,
                    std::vector<cu::CUevent>& events);
  // Likewise, after all work on the stream.
  Status after_all(cu::CUstream stream, std::uint64_t now, std::vector<cu::CUevent>& events);

  // The newest arrival, and the newest population, that the stream already waits for.
  std::uint64_t awaited(cu::CUstream stream) { return find(stream).awaited; }
  void set_awaited(cu::CUstream stream, std::uint64_t ticket) {
    UMEM_ASSERT(ticket > awaited(stream), "a stream waits for later arrivals only");
    find(stream).awaited = ticket;
  }
  std::uint64_t awaited_local(cu::CUstream stream) { return find(stream).awaited_local; }
  // True if the stream still has to wait for one of them.
  bool behind(cu::CUstream stream, std::uint64_t arrival, std::uint64_t populated) {
    const Stream& known = find(stream);
    return arrival > known.awaited || populated > known.awaited_local;
  }
  void set_awaited_local(cu::CUstream stream, std::uint64_t ticket) {
    UMEM_ASSERT(ticket > awaited_local(stream), "a stream waits for later arrivals only");
    find(stream).awaited_local = ticket;
  }

 private:
  static constexpr std::size_t kMarks = 64;  // per stream; the oldest are recorded again
  static constexpr unsigned kOpsPerMark = 8;
  struct Mark {
    std::uint64_t time;
    cu::CUevent event;
  };
  struct Stream {
    cu::CUstream handle = nullptr;
    std::deque<Mark> marks;  // by time
    unsigned ops = 0;        // since the newest
    std::uint64_t awaited = 0, awaited_local = 0;
  };

  Stream& find(cu::CUstream stream);
  static std::deque<Mark>::iterator first_from(Stream& stream, std::uint64_t time);
  Status record(Stream& stream, std::uint64_t now);

  const driver::Table& table_;
  driver::Place place_;
  std::vector<Stream> streams_;
};

}  // namespace umem::engine
