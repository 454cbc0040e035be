// The pager's moves of pages, and their times on the link: the log of a replay.
//
// Only for an unbacked device: there no fault handler runs, so the log may allocate.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "soft/clock.h"
#include "soft/profiles.h"

namespace umem::soft {

enum class MoveKind : unsigned char {
  kHeld,     // on the device when the log began
  kFill,     // gets a frame without contents from the host
  kIn,       // contents are fetched from the host
  kOut,      // contents leave for the host
  kCopy,     // contents are copied to the host, and remain here
  kDrop,     // leaves without a copy: the host has the same contents
  kDiscard,  // its contents are dead; nothing moves
  kFree,     // its memory is freed
  kHost,     // the host works on it
};

struct Move {
  double issued_us = 0;  // the program's
  // Times on the link's or the host's lane; both are `issued_us` if neither works.
  double start_us = 0, end_us = 0;
  std::size_t page = 0;
  std::uint32_t pages = 0;
  std::int64_t operation = 0;  // accesses of the program (soft::access) before it
  MoveKind kind = MoveKind::kHeld;
  bool fault = false;    // an access waited for it; else it was requested
  bool unused = false;   // leaves or dies without an access since its fetch
  std::size_t work = 0;  // kHost: its number on the host's lane
  double work_us = 0;
};

struct Moves {
  std::uintptr_t base = 0;  // address of page 0
  std::vector<Move> rows;
};

class MoveLog {
 public:
  explicit MoveLog(const Clock& clock) : clock_(clock) {}

  bool on() const { return on_; }
  void start();
  std::vector<Move> take();

  void note(MoveKind kind, std::size_t page, bool unused = false);
  void note_work(std::size_t page, std::uint32_t pages, std::size_t work, double us);
  // The link has been given what was noted since the last call.
  void book(bool fault, const Profile& profile);
  void end_operation() { ++operation_; }

 private:
  const Clock& clock_;
  std::vector<Move> moves_;
  std::size_t booked_ = 0;  // moves before it have their times
  std::int64_t operation_ = 0;
  bool on_ = false;
};

}  // namespace umem::soft
