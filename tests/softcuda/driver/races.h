// Accesses to the same bytes without an order guaranteed by CUDA.
//
// Work is judged when it is enqueued (or as in judge.h), according to CUDA's guarantees and not the
// actual order:
// order within a stream, events, the legacy stream's rules, and the work that the program waited
// for or knows to be complete. The program's threads count as one strand, the host: they are
// ordered by the program's own locks, which are not visible here.
//
//   a write, beside a read or a write           a race
//   a discard, beside anything                  a race: CUDA leaves undefined what the bytes become
//   a free in stream order, beside anything     a race; so is anything after a free
//   a move, beside a read or a write            slow: the bytes stay right, by page faults
#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "judge.h"

namespace softcuda {

inline constexpr StrandId kHost = 0;

// One text for all equal ones, for the life of the process.
const char* intern(std::string_view text);

// With the work lock held, all of it.
class Races {
 public:
  // The stream's next operation; its clock is the stream's afterwards.
  void enqueued(Strand& stream, const Accesses& accesses);
  // The program itself does it, in the current call.
  void done_by_host(const Access& access);
  // Everything in `clock` is complete, and the program knows it.
  void host_knows(const Clock& clock) { host_.join(clock); }
  // The clock of all destroyed streams: they may have received work until then.
  const Clock& of_gone_streams() const { return gone_; }
  void stream_is_gone(const Strand& stream);
  void allocated(std::uintptr_t begin, std::size_t bytes);

  // The reports since the last call, a line each.
  std::string take();
  std::uint64_t slow() const { return slow_; }
  std::size_t size() const { return shadow_.size(); }

 private:
  struct Gone {
    StrandId id;
    Tick tick;
  };

  void start(Strand& stream);
  void enter(const Access& access, StrandId strand, Tick tick, const Clock& clock);
  void judge(const Mark& earlier, const Mark& later, std::uintptr_t begin, std::uintptr_t end);
  void report(const Mark& earlier, const Mark& later, std::uintptr_t begin, std::uintptr_t end);
  void bound();

  Clock host_, gone_;
  StrandId last_id_ = kHost;
  std::vector<Gone> spare_;  // ids of destroyed streams
  Shadow shadow_;
  std::size_t prune_at_ = 4096;
  std::uint64_t slow_ = 0;
  using Key = std::tuple<const char*, Use, StrandId, const char*, Use, StrandId>;
  std::set<Key> reported_;
  std::vector<std::string> reports_;
};

Races& races();

}  // namespace softcuda
