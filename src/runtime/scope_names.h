// The scopes that blocks are allocated in.
#pragma once
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace umem::runtime {

// Scopes by number; 0 is none. It has a lock of its own.
class ScopeNames {
 public:
  std::string name(std::uint32_t number) const;
  // The number of the calling thread's scope.
  static std::uint32_t current();
  // Enters the scope on the calling thread, and returns the name of the one before.
  std::string enter(const std::string& name);
  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  std::uint32_t number_of(const std::string& name);

  mutable std::mutex mutex_;
  std::vector<std::string> names_{""};
  std::unordered_map<std::string, std::uint32_t> numbers_{{"", 0}};
};

}  // namespace umem::runtime
