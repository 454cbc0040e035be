// Vector clocks, and the last uses of bytes of memory.
//
// A strand is a sequence of operations: a stream, or the program's threads together. A strand's
// ticks count its operations; a clock has each strand's progress, as far as another one can rely on
// it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace softcuda {

using Tick = std::uint64_t;
using StrandId = std::uint32_t;

class Clock {
 public:
  Tick at(StrandId strand) const { return strand < ticks_.size() ? ticks_[strand] : 0; }
  void set(StrandId strand, Tick tick);
  void join(const Clock& other);

 private:
  std::vector<Tick> ticks_;
};

// A move takes bytes to the host or to the device, and keeps them.
enum class Use : std::uint8_t { kRead, kWrite, kMove, kDiscard, kFree };

struct Access {
  std::uintptr_t begin = 0, end = 0;
  Use use = Use::kRead;
  const char* name = "";  // the operator's or driver call's; interned
};
using Accesses = std::vector<Access>;

// A past access.
struct Mark {
  StrandId strand = 0;
  Tick tick = 0;  // 0: there was none
  Use use = Use::kRead;
  const char* name = "";

  bool before(const Clock& clock) const { return clock.at(strand) >= tick; }
};

class Shadow {
 public:
  // An earlier access to the bytes from `begin` to `end` that the new one's clock does not know, or
  // that left nothing to access.
  using Met = std::function<void(const Mark& earlier, std::uintptr_t begin, std::uintptr_t end)>;

  // Records the access, made as `mark` with the knowledge `clock`.
  void enter(const Access& access, const Mark& mark, const Clock& clock, const Met& met);
  // The bytes are new: earlier uses of their addresses are forgotten.
  void forget(std::uintptr_t begin, std::uintptr_t end);
  // Forgets the uses in `clock`, which precede all future work, except frees.
  void prune(const Clock& clock);
  void clear() { segments_.clear(); }
  std::size_t size() const { return segments_.size(); }

 private:
  // Bytes with one history: their last write, and their uses since then.
  struct Segment {
    std::uintptr_t end = 0;
    Mark last;
    std::vector<Mark> uses;
  };
  using Segments = std::map<std::uintptr_t, Segment>;  // by their begin; they do not overlap

  Segments::iterator split(std::uintptr_t at);
  void replace(Segments::iterator first, Segments::iterator last, const Access& access,
               const Mark& mark);
  void add_use(Segments::iterator first, Segments::iterator last, const Access& access,
               const Mark& mark, const Clock& clock);

  Segments segments_;
};

}  // namespace softcuda
