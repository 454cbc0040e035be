// The spans of blocks that the program pinned, and the scopes that blocks are allocated in.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
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

// Scopes by number; 0 is none. It has a lock of its own.
class ScopeNames {
 public:
  std::uint32_t number_of(const std::string& name);
  std::string name(std::uint32_t number) const;
  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> names_{""};
  std::unordered_map<std::string, std::uint32_t> numbers_{{"", 0}};
};

// Of the calling thread.
std::uint32_t current_scope();

}  // namespace umem::runtime
