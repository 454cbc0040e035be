// The spans of blocks that the program pinned, and the scope that a block was allocated in.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "managed/memory_ops.h"
#include "runtime/hints.h"

namespace umem::runtime {

struct Pin {
  managed::MemSpan span;
  PinKind kind = PinKind::kPin;
  std::uint64_t number = 0;  // of the call that made it
  std::string label;
};
// By the first byte. A span lies in one block and goes with it.
using Pins = std::multimap<std::uintptr_t, Pin>;

// Scopes by number; 0 is none.
class Scopes {
 public:
  std::uint32_t number_of(const std::string& name);
  const std::string& name(std::uint32_t number) const { return names_[number]; }
  void put(const void* block, std::uint32_t scope) { of_[block] = scope; }
  void forget(const void* block) {
    if (!of_.empty()) of_.erase(block);
  }
  // Of a block that begins there.
  std::uint32_t of(const void* block) const {
    const auto found = of_.find(block);
    return found == of_.end() ? 0 : found->second;
  }

 private:
  std::vector<std::string> names_{""};
  std::unordered_map<std::string, std::uint32_t> numbers_{{"", 0}};
  std::unordered_map<const void*, std::uint32_t> of_;
};

// Of the calling thread.
std::uint32_t current_scope();

}  // namespace umem::runtime
