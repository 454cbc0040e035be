// Events of a trace, played on the machine as they come.
//
// What a trace has between two ops belongs to the later one: an op's event comes at its end. So
// allocations wait for it, and releases after them; a release before any allocation happens at
// once.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "replay/block_table.h"
#include "replay/event.h"
#include "replay/machine.h"

namespace umem::replay {

class Player {
 public:
  explicit Player(Machine& machine) : machine_(machine) {}

  // kInvalidArgument with the reason for an event that cannot be at this place.
  Status play(const Event& event);
  // The end of the trace: without any step event all of it is one step.
  Status finish();
  // A live block becomes the caller's; false where there is none of this id.
  bool take(BlockId id, void*& ptr);
  void release_all();

 private:
  struct Action {
    BlockId id;
    void* ptr;
    std::size_t bytes;
    residency::Tag tag;
    residency::Family family;
    std::uint32_t frees;  // index + 1 of the buffered allocation; 0: frees `ptr`
    bool allocates;
    bool freed;  // by a later action
  };
  // An op's scratch is little; a trace that allocates and frees without an op must not grow it.
  static constexpr std::size_t kMaxBuffered = 1 << 16;

  Status allocate(const Event& event);
  Status free(const Event& event);
  Status op(const Event& event);
  Status step();
  Status use(const Event& event, std::size_t which);
  Status perform();

  Machine& machine_;
  BlockTable blocks_;
  std::vector<Action> buffered_;
  struct Use {
    Block* block;
    bool write;
    bool whole;
  };
  std::vector<Use> uses_;
  struct Part {  // of a use that is not of the whole block
    std::uint32_t use;
    std::size_t begin, end;
  };
  std::vector<Part> parts_;
  std::uint64_t ops_ = 0, ops_at_step_ = 0;
};

}  // namespace umem::replay
