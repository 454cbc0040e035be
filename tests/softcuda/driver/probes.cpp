#include "probes.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <sstream>

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

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Probe>> probes;

  Registry() { plan_from_environment(); }

  Probe& get(const std::string& name) {
    std::unique_ptr<Probe>& slot = probes[name];
    if (!slot) slot = std::make_unique<Probe>(name);
    return *slot;
  }

  // "entry:nth:error,..." A bad item ends the program: a sweep that injects nothing would pass.
  void plan_from_environment() {
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
      get(plain_name(name)).inject(nth, error);
    }
  }
};

Registry& registry() {
  static auto* instance = new Registry;  // never destroyed: entry points are called during exit
  return *instance;
}

}  // namespace

int Probe::enter() {
  const std::uint64_t call = calls_.fetch_add(1, std::memory_order_relaxed) + 1;
  if (!armed_.load(std::memory_order_acquire)) return 0;
  const std::lock_guard guard(mutex_);
  const auto found = std::find_if(injections_.begin(), injections_.end(),
                                  [call](const Injection& i) { return i.call == call; });
  if (found == injections_.end()) return 0;
  const int error = found->error;
  injections_.erase(found);
  armed_.store(!injections_.empty(), std::memory_order_release);
  return error;
}

void Probe::inject(std::uint64_t nth, int error) {
  const std::lock_guard guard(mutex_);
  injections_.push_back({calls() + nth, error});
  armed_.store(true, std::memory_order_release);
}

void Probe::reset() {
  const std::lock_guard guard(mutex_);
  calls_.store(0, std::memory_order_relaxed);
  injections_.clear();
  armed_.store(false, std::memory_order_release);
}

Probe& probe_of(const char* function) {
  const std::lock_guard guard(registry().mutex);
  return registry().get(plain_name(function));
}

}  // namespace softcuda

using softcuda::Probe;

int softcuda_inject(const char* name, std::uint64_t nth, int error) {
  if (!name || nth == 0 || error == 0) return 1;
  softcuda::probe_of(name).inject(nth, error);
  return 0;
}
std::uint64_t softcuda_calls(const char* name) {
  return name ? softcuda::probe_of(name).calls() : 0;
}
void softcuda_reset() {
  const std::lock_guard guard(softcuda::registry().mutex);
  for (auto& [name, probe] : softcuda::registry().probes) probe->reset();
}
void* softcuda_probe(const char* name) {
  return &softcuda::probe_of(name);
}
int softcuda_enter(void* probe) {
  return static_cast<Probe*>(probe)->enter();
}
