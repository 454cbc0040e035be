// The engine's part in shared pages: a block takes them over as the one before left them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "engine/engine_state.h"
#include "engine/shared_pages.h"
#include "engine/transfers.h"

namespace umem::engine {

class Sharing {
 public:
  Sharing(EngineState& state, Transfers& transfers) : state_(state), transfers_(transfers) {}

  // Blocks of the range take its pages in turn from here on: what a retired one had on the device
  // is there for the next. Before the range goes, with no block in it: close.
  void open(std::uintptr_t base, std::size_t bytes) { pages_.open(base, bytes); }
  void close();
  bool contains(std::uintptr_t at) const { return pages_.contains(at); }

  // A block begins to live there; with all frames still in place it is on the device, and nothing
  // is asked of the driver. Returns the bytes of the frames found.
  Result<std::size_t> admit(RangeId id, std::size_t bytes, Tag tag, Family family,
                            cu::CUstream stream);
  void retire(RangeId id);
  // Drops dead pages until `bytes` more fit or none is left. Where the driver cannot discard, they
  // go to the host.
  void drop(std::size_t bytes);
  // Gives the memory of all dead pages, of a range in which other blocks live, to the driver.
  Status release_dead();
  // The driver has taken the frames of what was dropped, and holds those of dead pages.
  void forget_dropped();
  Ledger::Idle idle() const { return pages_.amounts(); }
  // What the driver did with the pages meanwhile is not known: with `drop` it loses what it has.
  void lose_track(bool drop);

 private:
  Status discard(const std::vector<managed::MemSpan>& spans) {
    return transfers_.discard(spans, pages_.stream, pages_.arrival, pages_.departure);
  }
  Status drop_dead(std::size_t bytes, bool give_back);
  Status send_dropped(std::size_t bytes);

  EngineState& state_;
  Transfers& transfers_;
  SharedPages pages_;
  std::vector<managed::MemSpan> spans_;  // scratch
};

}  // namespace umem::engine
