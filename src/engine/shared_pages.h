// Pages of one range that blocks of disjoint lives take in turn (arena/layout.h). A block's pages
// are its unit's while it lives; between two lives they are facts kept here: which are still on the
// device, which were dropped, and for which the driver holds host memory.
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
  const Amounts& amounts() const { return idle_; }  // of pages between two lives
  Amounts count(managed::MemSpan span) const;
  // A block begins to live in the span.
  void take(managed::MemSpan span);
  // It is gone: whether its frames are still held, and how much host memory the driver holds.
  void give_back(managed::MemSpan span, bool resident, std::size_t host_bytes);
  // Appends spans of dead pages, from the lowest on, of at least `bytes` if there are so many.
  void find_dead(std::size_t bytes, std::vector<managed::MemSpan>& out) const;
  void drop(const std::vector<managed::MemSpan>& dead);
  // Pages between two lives, for which the driver holds host memory from here on.
  void hold_host(const std::vector<managed::MemSpan>& idle);
  // Of dropped pages the frames are gone.
  void forget_dropped();
  // Appends all pages between two lives; what is known of their frames is forgotten.
  void lose_track(std::vector<managed::MemSpan>& out);

  // Of the lanes: the last that moved pages which were given back since.
  std::uint64_t arrival = 0, departure = 0, populated = 0;
  cu::CUstream stream = nullptr;  // that the blocks are allocated on

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
