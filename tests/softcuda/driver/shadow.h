// Vector clocks, and who last used which bytes of memory.
//
// A strand is what happens one after the other: a stream, or the program's threads together. The
// ticks of a strand count what it does; a clock says how far each strand had come, as far as
// something of another one can rely on it.
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
  const char* name = "";  // of the operator or the driver's call; interned
};
using Accesses = std::vector<Access>;

// An access that was made.
struct Mark {
  StrandId strand = 0;
  Tick tick = 0;  // 0: there was none
  Use use = Use::kRead;
  const char* name = "";

  bool before(const Clock& clock) const { return clock.at(strand) >= tick; }
};

class Shadow {
 public:
  // An earlier access to the bytes from `begin` to `end`, which the new one's clock does not know,
  // or after which there is nothing left to access.
  using Met = std::function<void(const Mark& earlier, std::uintptr_t begin, std::uintptr_t end)>;

  // Enters the access, made as `mark` by something that knows `clock`.
  void enter(const Access& access, const Mark& mark, const Clock& clock, const Met& met);
  // The bytes are new: what was done at their addresses before is forgotten.
  void forget(std::uintptr_t begin, std::uintptr_t end);
  // Forgets what everything that is still to come has `clock` before it, but for what was freed.
  void prune(const Clock& clock);
  void clear() { segments_.clear(); }
  std::size_t size() const { return segments_.size(); }

 private:
  // Bytes with one history: what left them as they are, and their uses since then.
  struct Segment {
    std::uintptr_t end = 0;
    Mark last;
    std::vector<Mark> uses;
  };
  using Segments = std::map<std::uintptr_t, Segment>;  // by where they begin; they do not overlap

  Segments::iterator split(std::uintptr_t at);
  void replace(Segments::iterator first, Segments::iterator last, const Access& access,
               const Mark& mark);
  void add_use(Segments::iterator first, Segments::iterator last, const Access& access,
               const Mark& mark, const Clock& clock);

  Segments segments_;
};

}  // namespace softcuda
