// Memory that operators use and umem does not manage: tensors that were made before umem was on,
// and memory of other libraries.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <unordered_set>

namespace umem::runtime {

class Unmanaged {
 public:
  // An operator uses the storage. Small storages do not count.
  void use(const void* storage, std::size_t bytes) noexcept;
  void step_ended() noexcept;
  void reset() noexcept;
  // The most bytes that the operators of one step used.
  std::uint64_t most_bytes() const noexcept { return most_; }

 private:
  // Never waits, so that a fork at any moment leaves no lock behind that a child would wait for: a
  // use that meets another thread's is not counted.
  template <class Change>
  void change(Change change) noexcept;

  std::atomic_flag busy_;
  std::unordered_set<const void*> step_;  // storages of the present step
  std::uint64_t step_bytes_ = 0;
  std::atomic<std::uint64_t> most_{0};
};

}  // namespace umem::runtime
