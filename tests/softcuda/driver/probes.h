// Every entry point counts its calls and can be made to fail.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace softcuda {

class Probe {
 public:
  explicit Probe(std::string name) : name_(std::move(name)) {}
  // Counts a call; the planned error of this call, or 0.
  int enter();
  void inject(std::uint64_t nth, int error);
  void reset();
  std::uint64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  const std::string& name() const { return name_; }

 private:
  struct Injection {
    std::uint64_t call;
    int error;
  };
  const std::string name_;
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<bool> armed_{false};
  std::mutex mutex_;
  std::vector<Injection> injections_;
};

// `function` may carry the version suffix of an exported name (cuMemFree_v2): it is dropped.
Probe& probe_of(const char* function);

}  // namespace softcuda

// First statement of an entry point.
#define SOFTCUDA_ENTER()                                                      \
  do {                                                                        \
    static ::softcuda::Probe& probe = ::softcuda::probe_of(__func__);         \
    if (const int error = probe.enter()) return static_cast<CUresult>(error); \
  } while (false)
