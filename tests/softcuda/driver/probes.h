// Every entry point counts its calls and can be made to fail.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace softcuda {

// A planned result that is no error: the call does nothing and reports success, as if the caller
// had forgotten it.
inline constexpr int kSkipped = -1;

// The effect of a planned failure in addition to its error.
enum class Harm { kNone, kLoses, kTears };

class Probe {
 public:
  explicit Probe(std::string name);
  // Counts a call; returns its planned result, or 0 to proceed.
  int enter();
  // The nth call from now gets `result`. If it loses the device, all later ones that need it fail
  // too. The first half of a torn batch is executed.
  void inject(std::uint64_t nth, int result, Harm harm = Harm::kNone);
  void skip_all();
  void reset();
  std::uint64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  const std::string& name() const { return name_; }

 private:
  struct Injection {
    std::uint64_t call;
    int result;
    Harm harm;
  };
  const std::string name_;
  const bool needs_device_;
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<bool> armed_{false}, skipped_{false};
  std::mutex mutex_;
  std::vector<Injection> injections_;
};

// `function` may carry the version suffix of an exported name (cuMemFree_v2): it is dropped.
Probe& probe_of(const char* function);

// All later calls that need the device fail, until it is reset.
void lose_device(int error);
int lost();  // its error, or 0

// CUDA's API is not for functions that a stream calls on the host: each call there is refused.
inline constexpr int kNotPermitted = 800;
void run_host_function(void (*function)(void*), void* data);

// A call in progress. Another entry point's call is not counted and never fails: it is not the
// program's.
class Call {
 public:
  explicit Call(Probe& probe);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  bool planned() const { return planned_ != 0 && !torn(); }
  int result() const { return planned_ == kSkipped ? 0 : planned_; }
  // For batches, which alone are torn: the result once the first half is carried out.
  bool torn() const { return planned_ < kSkipped; }
  int torn_result() const { return kSkipped - planned_; }

 private:
  int planned_;
};

}  // namespace softcuda

// First statement of an entry point.
#define SOFTCUDA_ENTER()                                                         \
  static ::softcuda::Probe& softcuda_own_probe = ::softcuda::probe_of(__func__); \
  const ::softcuda::Call softcuda_call(softcuda_own_probe);                      \
  if (softcuda_call.planned()) return static_cast<CUresult>(softcuda_call.result())
