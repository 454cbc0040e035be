// Address -> 32-bit id in one load: a flat array with an entry for every 2 MiB of a 48-bit user
// address space (47 bits on x86-64, 48 on aarch64), 512 MiB of it reserved and only touched pages
// of it committed.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/units.h"

namespace umem::managed {

class PageMap {
 public:
  PageMap();
  ~PageMap();
  PageMap(const PageMap&) = delete;
  PageMap& operator=(const PageMap&) = delete;

  bool ok() const { return entries_ != nullptr; }
  std::uint32_t find(std::uintptr_t address) const {
    const std::uintptr_t page = address >> kPageShift;
    return page < size_ ? __atomic_load_n(&entries_[page], __ATOMIC_ACQUIRE) : 0;
  }
  // The map covers user addresses of 48 bits; ranges beyond cannot be entered.
  static bool covers(std::uintptr_t base, std::size_t bytes) {
    return bytes <= kSpace && base <= kSpace - bytes;
  }
  // Sets the entry of every page of [base, base + bytes), both 2 MiB-aligned.
  void set(std::uintptr_t base, std::size_t bytes, std::uint32_t id);

 private:
  static constexpr std::uintptr_t kSpace = std::uintptr_t{1} << 48;
  static constexpr std::size_t kEntries = kSpace >> kPageShift;
  std::uint32_t* entries_ = nullptr;
  std::size_t size_ = 0;  // 0 if the map could not be reserved
};

}  // namespace umem::managed
