// Pages of one range that blocks with disjoint lifetimes use in turn (arena/layout.h). A block's
// pages belong to its unit while it lives. Between two lives their state is kept here: which are
// still on the device, which were dropped, and for which the driver holds host memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "managed/memory_ops.h"
#include "residency/ledger.h"

namespace umem::engine {

using residency::Ledger;

class SharedPages {
 public:
  void open(std::uintptr_t base, std::size_t bytes);
  void close() { *this = {}; }
  bool contains(std::uintptr_t at) const { return at - base_ < pages_.size() << kPageShift; }

  managed::MemSpan span() const { return {base_, pages_.size() << kPageShift}; }

  using Amounts = Ledger::Idle;
  const Amounts& amounts() const { return idle_; }  // counts pages between two lives
  Amounts count(managed::MemSpan span) const;
  // A block begins to live in the span.
  void take(managed::MemSpan span);
  // The block died. `resident`: its frames are still held; `host_bytes`: host memory that the
  // driver holds.
  void give_back(managed::MemSpan span, bool resident, std::size_t host_bytes);
  // Appends spans of dead pages in ascending order, until they have `bytes` or none is left.
  void find_dead(std::size_t bytes, std::vector<managed::MemSpan>& out) const;
  void drop(const std::vector<managed::MemSpan>& dead);
  // The driver holds host memory for these pages from now on.
  void hold_host(const std::vector<managed::MemSpan>& idle);
  // The driver has taken the frames of dropped pages.
  void forget_dropped();
  // Appends all pages between two lives, and forgets the state of their frames.
  void lose_track(std::vector<managed::MemSpan>& out);

  // Tickets of the last moves of pages that were given back since.
  std::uint64_t arrival = 0, departure = 0, populated = 0;
  cu::CUstream stream = nullptr;  // the stream that the blocks are allocated on

 private:
  struct Page {
    bool idle = true, dead = false, dropped = false, host = false;
  };
  template <class Act>
  static void each(std::vector<Page>& pages, std::uintptr_t base, managed::MemSpan span, Act act);
  void count(const Page& page, bool entering);
  template <class Want>
  void append_runs(std::size_t bytes, std::vector<managed::MemSpan>& out, Want want) const;

  std::uintptr_t base_ = 0;
  std::vector<Page> pages_;
  Amounts idle_;
};

}  // namespace umem::engine
