// Live blocks by address, without an allocation once it is large enough: open addressing with
// linear probing, and deletion by moving back what follows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace umem::trace {

struct Block {
  std::uintptr_t address = 0;  // 0: an empty place
  std::size_t bytes = 0;       // as requested
  std::uint64_t event = 0;     // number of its alloc event
  std::uint32_t id = 0;
  int device = 0;
  std::uint64_t stamp = 0;  // the last list that contains it
  const char* tag = "";
  const char* family = "";
  bool provisional = false;  // the op that made it, and will tag it, has not ended
  // In the last list: which access it is, and whether that is of parts of the block.
  std::uint64_t access = 0;
  bool in_part = false;
};

class BlockMap {
 public:
  void clear() {
    places_.assign(places_.empty() ? kMin : places_.size(), {});
    count_ = 0;
  }
  Block* find(std::uintptr_t address) {
    if (places_.empty()) return nullptr;
    Block& place = places_[probe(address)];
    return place.address ? &place : nullptr;
  }
  // Replaces the block at the same address.
  void put(const Block& block) {
    if (places_.empty()) clear();
    if (2 * (count_ + 1) > places_.size()) grow();
    Block& place = places_[probe(block.address)];
    if (!place.address) ++count_;
    place = block;
  }
  void erase(std::uintptr_t address) {
    if (places_.empty()) return;
    std::size_t hole = probe(address);
    if (!places_[hole].address) return;
    --count_;
    const std::size_t mask = places_.size() - 1;
    for (std::size_t next = (hole + 1) & mask; places_[next].address; next = (next + 1) & mask) {
      const std::size_t home = hash(places_[next].address);
      if (((next - home) & mask) < ((next - hole) & mask))
        continue;  // it would lie before its home
      places_[hole] = places_[next];
      hole = next;
    }
    places_[hole] = {};
  }
  template <class Act>
  void each(Act act) const {
    for (const Block& place : places_)
      if (place.address) act(place);
  }

 private:
  static constexpr std::size_t kMin = std::size_t{1} << 12;

  std::size_t hash(std::uintptr_t address) const {
    return (((address >> 8) * 0x9E3779B97F4A7C15u) >> 20) & (places_.size() - 1);
  }
  std::size_t probe(std::uintptr_t address) const {
    const std::size_t mask = places_.size() - 1;
    std::size_t at = hash(address);
    while (places_[at].address && places_[at].address != address) at = (at + 1) & mask;
    return at;
  }
  void grow() {
    std::vector<Block> before(2 * places_.size());
    std::swap(before, places_);
    for (const Block& block : before)
      if (block.address) places_[probe(block.address)] = block;
  }

  std::vector<Block> places_;  // a power of two
  std::size_t count_ = 0;
};

}  // namespace umem::trace
