// The engine's part of shared pages: a block takes pages over in the state that the previous block
// left.
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

  // Blocks of the range use its pages in turn from now on: resident pages of a retired block are
  // reused by the next one. Call `close` before the range is freed, with no block in it.
  void open(std::uintptr_t base, std::size_t bytes) { pages_.open(base, bytes); }
  void close();
  bool contains(std::uintptr_t at) const { return pages_.contains(at); }

  // Mapped memory, which moves in whole units: maps all pages as one, after `open`. Blocks begin
  // and end there without a driver call, and none leaves before `part`. `stays`: it leaves only if
  // nothing else can. kOutOfDeviceMemory if the budget has no room, or the device.
  Status join(bool stays);
  bool joined() const { return joined_; }
  bool stays() const { return joined_ && stays_; }
  void stays_no_longer() { stays_ = false; }
  bool parted() const { return state_.mapped() && pages_.span().bytes > 0 && !joined_; }
  // Ends that: the live blocks become units of their own, on the host, and `lost` ones without
  // their bytes. Appends all of them to `parted`. Waits for the device. kBadState if an op uses
  // one; unless `at_rest`, also if one may be used unseen. kOutOfHostMemory if the host has no
  // room.
  Status part(bool at_rest, const std::vector<RangeId>& lost, std::vector<RangeId>& parted);

  // A block begins to live there. If all frames are in place it is on the device, without a driver
  // call. Returns the bytes of the frames in place.
  Result<std::size_t> admit(RangeId id, std::size_t bytes, Tag tag, Family family,
                            cu::CUstream stream);
  void retire(RangeId id);
  // Drops dead pages until `bytes` more fit or none is left. If the driver cannot discard, they are
  // sent to the host.
  void drop(std::size_t bytes);
  // Returns the memory of all dead pages to the driver, while other blocks of the range live.
  Status release_dead();
  // The driver has taken the frames of dropped pages, and holds those of dead pages.
  void forget_dropped();
  Ledger::Idle idle() const { return pages_.amounts(); }
  // The driver may have moved the pages meanwhile; with `drop` their frames are dropped.
  void lose_track(bool drop);

 private:
  Status discard(const std::vector<managed::MemSpan>& spans) {
    return transfers_.discard(spans, pages_.stream, pages_.arrival, pages_.departure);
  }
  Status may_part(bool at_rest, const std::vector<RangeId>& lost) const;
  Status drop_dead(std::size_t bytes, bool give_back);
  Status send_dropped(std::size_t bytes);

  EngineState& state_;
  Transfers& transfers_;
  SharedPages pages_;
  bool joined_ = false, stays_ = false;
  std::vector<managed::MemSpan> spans_;  // scratch
};

}  // namespace umem::engine
