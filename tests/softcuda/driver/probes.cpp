#include "probes.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <sstream>
#include <string_view>

#include "config.h"
#include "softcuda.h"

namespace softcuda {
namespace {

std::string plain_name(std::string name) {
  const std::size_t at = name.rfind("_v");
  if (at != std::string::npos && at + 3 == name.size() &&
      std::isdigit(static_cast<unsigned char>(name.back())))
    name.resize(at);
  return name;
}

std::atomic<int> g_lost{0};    // the error of a device that is lost, or 0
thread_local int t_calls = 0;  // in progress, one inside the other
thread_local bool t_in_host_function = false;

// The calls that a real driver refuses once the device is lost; queries and settings still work.
bool needs_device(const std::string& name) {
  constexpr const char* kKinds[] = {"Mem",    "Malloc",  "Free",          "Host",
                                    "Stream", "Event",   "Launch",        "DeviceSynchronize",
                                    "Graph",  "Pointer", "CtxSynchronize"};
  const std::string_view rest = std::string_view(name).substr(name.starts_with("cuda") ? 4 : 2);
  return std::any_of(std::begin(kKinds), std::end(kKinds),
                     [rest](const char* kind) { return rest.starts_with(kind); });
}

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Probe>> probes;

  Probe& get(const std::string& name) {
    std::unique_ptr<Probe>& slot = probes[name];
    if (!slot) slot = std::make_unique<Probe>(name);
    return *slot;
  }
};

Registry& registry() {
  static auto* instance = new Registry;  // never destroyed: entry points are called during exit
  return *instance;
}

// SOFTCUDA_FAIL, "entry:nth:error,...". A bad item ends the program: a sweep that injects nothing
// would pass.
bool plan_from_environment() {
  std::istringstream items(config().fail);
  for (std::string item; std::getline(items, item, ',');) {
    char name[128] = "";
    unsigned long long nth = 0;
    int error = 0, end = 0;
    const int fields = std::sscanf(item.c_str(), "%127[^:]:%llu:%d%n", name, &nth, &error, &end);
    if (fields != 3 || nth == 0 || error == 0 || item.size() != static_cast<std::size_t>(end)) {
      std::fprintf(stderr, "SOFTCUDA_FAIL: bad item '%s'; it is entry:nth:error, nth from 1\n",
                   item.c_str());
      std::exit(2);
    }
    probe_of(name).inject(nth, error);
  }
  return true;
}

}  // namespace

Probe::Probe(std::string name) : name_(std::move(name)), needs_device_(needs_device(name_)) {}

int Probe::enter() {
  // As a real driver does, it reads the environment at the first call and not when it is loaded.
  static const bool planned = plan_from_environment();
  static_cast<void>(planned);
  const std::uint64_t call = calls_.fetch_add(1, std::memory_order_relaxed) + 1;
  if (const int lost = g_lost.load(std::memory_order_relaxed); lost != 0 && needs_device_)
    return lost;
  if (skipped_.load(std::memory_order_relaxed)) return kSkipped;
  if (!armed_.load(std::memory_order_acquire)) return 0;
  const std::lock_guard guard(mutex_);
  const auto found = std::find_if(injections_.begin(), injections_.end(),
                                  [call](const Injection& i) { return i.call == call; });
  if (found == injections_.end()) return 0;
  const int result = found->harm == Harm::kTears ? kSkipped - found->result : found->result;
  if (found->harm == Harm::kLoses) g_lost = result;
  injections_.erase(found);
  armed_.store(!injections_.empty(), std::memory_order_release);
  return result;
}

void Probe::inject(std::uint64_t nth, int result, Harm harm) {
  const std::lock_guard guard(mutex_);
  injections_.push_back({calls() + nth, result, harm});
  armed_.store(true, std::memory_order_release);
}

void Probe::skip_all() {
  skipped_ = true;
}

void Probe::reset() {
  const std::lock_guard guard(mutex_);
  calls_.store(0, std::memory_order_relaxed);
  injections_.clear();
  armed_.store(false, std::memory_order_release);
  skipped_ = false;
}

void lose_device(int error) {
  g_lost = error;
}
int lost() {
  return g_lost;
}

void run_host_function(void (*function)(void*), void* data) {
  t_in_host_function = true;
  function(data);
  t_in_host_function = false;
}

Call::Call(Probe& probe) : planned_(softcuda_enter(&probe)) {}
Call::~Call() {
  softcuda_leave();
}

Probe& probe_of(const char* function) {
  const std::lock_guard guard(registry().mutex);
  return registry().get(plain_name(function));
}

}  // namespace softcuda

using softcuda::Probe;

int softcuda_inject(const char* name, std::uint64_t nth, int error) {
  if (!name || nth == 0 || error <= 0) return 1;
  softcuda::probe_of(name).inject(nth, error);
  return 0;
}
int softcuda_skip(const char* name) {
  if (!name) return 1;
  softcuda::probe_of(name).skip_all();
  return 0;
}
int softcuda_lose(const char* name, std::uint64_t nth, int error) {
  if (!name || nth == 0 || error <= 0) return 1;
  softcuda::probe_of(name).inject(nth, error, softcuda::Harm::kLoses);
  return 0;
}
int softcuda_tear(const char* name, std::uint64_t nth, int error) {
  if (!name || std::string_view(name).find("Batch") == std::string_view::npos || nth == 0 ||
      error <= 0)
    return 1;
  softcuda::probe_of(name).inject(nth, error, softcuda::Harm::kTears);
  return 0;
}
std::uint64_t softcuda_calls(const char* name) {
  return name ? softcuda::probe_of(name).calls() : 0;
}
void softcuda_reset() {
  const std::lock_guard guard(softcuda::registry().mutex);
  for (auto& [name, probe] : softcuda::registry().probes) probe->reset();
  softcuda::g_lost = 0;
}
void* softcuda_probe(const char* name) {
  return &softcuda::probe_of(name);
}
int softcuda_enter(void* probe) {
  if (softcuda::t_calls++ > 0) return 0;
  const int planned = static_cast<Probe*>(probe)->enter();
  return softcuda::t_in_host_function ? softcuda::kNotPermitted : planned;
}
void softcuda_leave() {
  --softcuda::t_calls;
}
