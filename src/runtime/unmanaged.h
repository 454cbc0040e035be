// Memory that operators use and umem does not manage: tensors that were made before umem was on,
// and memory of other libraries.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace umem::runtime {

class Unmanaged {
 public:
  // An operator uses so many bytes of the storage. Few bytes do not count.
  void use(const void* storage, std::size_t bytes) noexcept;
  // A session begins. Its first step does not count: it includes all that a program does at its
  // start, as loading weights.
  void begin() noexcept {
    counts_ = false;
    reset();
  }
  void step_ended() noexcept { counts_ = ended_ = true; }
  void reset() noexcept {
    ended_ = true;
    most_ = 0;
  }
  void set_most_bytes(std::uint64_t bytes) noexcept { most_ = bytes; }
  // The most bytes that the operators of one step used, by the largest use of each storage.
  std::uint64_t most_bytes() const noexcept { return most_; }

 private:
  // Never waited for, so that a fork at any moment leaves no lock behind that a child would wait
  // for: a use that meets another thread's is not counted.
  std::atomic_flag busy_;
  std::atomic<bool> counts_{false};
  std::atomic<bool> ended_{false};                     // the step of `step_`
  std::unordered_map<const void*, std::size_t> step_;  // bytes used, by storage
  std::uint64_t step_bytes_ = 0;
  std::atomic<std::uint64_t> most_{0};
};

}  // namespace umem::runtime
