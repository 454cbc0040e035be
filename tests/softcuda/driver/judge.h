// When an operation's accesses are judged: when it is enqueued, or, behind a word of memory that
// its stream waits for, when the word has its value. Everything that the program knew to be
// complete at that time precedes the operation.
//
// All below with the work lock held.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "shadow.h"

namespace softcuda {

// A strand's clock after one of its operations; final once that has been judged.
struct Known {
  Clock clock;
  bool final = false;
};
using KnownRef = std::shared_ptr<Known>;

// A word that a stream waits for.
struct Flag {
  const std::uint32_t* word = nullptr;
  std::uint32_t value = 0;
  bool equal = false;  // else at least, as a cyclic counter
  bool seen = false;   // with its value
  Clock writer;        // of the stream that wrote it, if one did

  bool satisfied() const;  // now; without the lock too
};
using FlagRef = std::shared_ptr<Flag>;

// An operation as the race detector sees it.
struct Judgement {
  Accesses accesses;
  std::vector<KnownRef> results;  // set when it is judged
  FlagRef flag;                   // for which it waits
  std::vector<KnownRef> after;    // filled by `enter`
};

// A stream's knowledge. It gets its id with its first operation.
struct Strand {
  StrandId id = 0;
  Clock clock;
  std::vector<KnownRef> after;     // of the next operation
  std::deque<Judgement> unjudged;  // in order
};

// The strand's clock after its last operation.
KnownRef known_after(Strand& strand);
// The same with the events for which no operation has waited yet.
std::vector<KnownRef> all_known_after(Strand& strand);
// The strand's next operation comes after what is known so.
void follow(Strand& strand, const KnownRef& known);
void follow(Strand& strand, Strand& other);
void enter(Strand& strand, Judgement judgement);
// Judges the strand's operations up to the first that has to wait; true if there was one to judge.
bool judge(Strand& strand);

}  // namespace softcuda
