// The live blocks of a trace by id: open addressing, no allocation but when it grows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "replay/event.h"

namespace umem::replay {

struct Block {
  static constexpr BlockId kNone = ~BlockId{0};

  BlockId id = kNone;
  void* ptr = nullptr;  // null while allocation is still to come, and of 0 bytes
  std::size_t bytes = 0;
  std::uint32_t pending = 0;  // index + 1 of the buffered allocation
  std::uint32_t slot = 0;     // in the accesses of the op that `op` says
  std::uint64_t op = 0;
};

class BlockTable {
 public:
  // Valid until the next insert or erase.
  Block* find(BlockId id) {
    for (std::size_t i = home(id);; i = next(i)) {
      if (slots_[i].id == id) return &slots_[i];
      if (slots_[i].id == Block::kNone) return nullptr;
    }
  }
  // The id is not there yet.
  Block& insert(BlockId id) {
    if (2 * (size_ + 1) > slots_.size()) grow();
    ++size_;
    return place(id);
  }
  void erase(Block* block) {
    --size_;
    // What probed past the hole moves into it.
    auto hole = static_cast<std::size_t>(block - slots_.data());
    for (std::size_t i = next(hole); slots_[i].id != Block::kNone; i = next(i)) {
      const std::size_t wanted = home(slots_[i].id);
      if (((i - wanted) & mask()) < ((i - hole) & mask())) continue;
      slots_[hole] = slots_[i];
      hole = i;
    }
    slots_[hole] = Block{};
  }
  std::size_t size() const { return size_; }
  template <class Act>
  void each(Act act) {
    for (Block& block : slots_)
      if (block.id != Block::kNone) act(block);
  }
  void clear() {
    slots_.assign(kMin, Block{});
    size_ = 0;
    shift_ = kMinShift;
  }

 private:
  static constexpr std::size_t kMin = 64;
  static constexpr unsigned kMinShift = 64 - 6;

  std::size_t mask() const { return slots_.size() - 1; }
  std::size_t next(std::size_t i) const { return (i + 1) & mask(); }
  std::size_t home(BlockId id) const { return id * 0x9E3779B97F4A7C15u >> shift_; }
  Block& place(BlockId id) {
    std::size_t i = home(id);
    while (slots_[i].id != Block::kNone) i = next(i);
    slots_[i].id = id;
    return slots_[i];
  }
  void grow() {
    std::vector<Block> old(2 * slots_.size());
    old.swap(slots_);
    --shift_;
    for (const Block& block : old)
      if (block.id != Block::kNone) place(block.id) = block;
  }

  std::vector<Block> slots_ = std::vector<Block>(kMin);
  std::size_t size_ = 0;
  unsigned shift_ = kMinShift;
};

}  // namespace umem::replay
