#include "config.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sstream>

#include "softcuda.h"

namespace softcuda {
namespace {

constexpr std::size_t kFrame = std::size_t{2} << 20;

[[noreturn]] void refuse(const char* name, const char* value, const char* allowed) {
  std::fprintf(stderr, "%s=%s: %s\n", name, value, allowed);
  std::exit(2);
}

std::uint64_t number(const char* name, std::uint64_t fallback, std::uint64_t min, std::uint64_t max,
                     const char* allowed) {
  const char* text = std::getenv(name);
  if (!text || !*text) return fallback;
  char* end = nullptr;
  const std::uint64_t value = std::strtoull(text, &end, 10);
  if (*end || value < min || value > max) refuse(name, text, allowed);
  return value;
}

std::string text_of(const char* name) {
  const char* text = std::getenv(name);
  return text ? text : "";
}

// Items between commas.
std::set<std::string> words_of(const char* name) {
  std::istringstream text(text_of(name));
  std::set<std::string> words;
  for (std::string word; std::getline(text, word, ',');) words.insert(word);
  return words;
}

Config read() {
  Config c;
  c.devices = static_cast<int>(number("SOFTCUDA_DEVICES", 1, 1, 2, "allowed are 1 and 2"));
  c.bytes = number("SOFTCUDA_BYTES", c.bytes, 4 * kFrame, std::size_t{1} << 40,
                   "bytes of device memory, at least 8388608") /
            kFrame * kFrame;
  c.seed = number("SOFTCUDA_SEED", 0, 0, ~std::uint64_t{0}, "a number; 0 for no deferral");
  c.version = static_cast<int>(number("SOFTCUDA_VERSION", 13000, 12000, 99999,
                                      "a driver version like 12080, at least 12000"));
  const std::string frames = text_of("SOFTCUDA_FRAMES");
  if (frames != "" && frames != "kept" && frames != "returned")
    refuse("SOFTCUDA_FRAMES", frames.c_str(), "allowed are kept and returned");
  c.uvm = frames != "returned";
  const std::string hints = text_of("SOFTCUDA_HINTS");
  if (hints != "" && hints != "worker" && hints != "streams")
    refuse("SOFTCUDA_HINTS", hints.c_str(), "allowed are worker and streams");
  if (hints != "") c.hints = hints == "worker" ? Hints::kWorker : Hints::kStreams;
  const std::size_t batch = std::clamp<std::size_t>(c.bytes / kFrame / 64, 1, 64);
  c.batch_frames = number("SOFTCUDA_BATCH", batch, 1, 64, "frames, 1 to 64");
  c.races = number("SOFTCUDA_RACES", 1, 0, 1, "allowed are 0 and 1") == 1;
  c.log = number("SOFTCUDA_LOG", 0, 0, 1, "allowed are 0 and 1") == 1;
  c.integrated = number("SOFTCUDA_INTEGRATED", 0, 0, 1, "allowed are 0 and 1") == 1;
  c.page_cache = number("SOFTCUDA_PAGE_CACHE", 0, 0, c.bytes, "bytes, at most the device's");
  c.near_bytes = number("SOFTCUDA_NEAR_BYTES", c.near_bytes, 0, c.near_bytes, "bytes of a node");
  c.fail = text_of("SOFTCUDA_FAIL");
  c.missing = words_of("SOFTCUDA_MISSING");
  c.no_cma = words_of("SOFTCUDA_NO_CMA");
  for (const std::string& device : c.no_cma)
    if (device != "0" && (device != "1" || c.devices < 2))
      refuse("SOFTCUDA_NO_CMA", device.c_str(), "numbers of devices, as 0 or 0,1");
  return c;
}

}  // namespace

const Config& config() {
  static const auto* instance = new Config(read());
  return *instance;
}

void log_once(const std::string& what) {
  if (!config().log) return;
  static std::mutex mutex;
  static auto* said = new std::set<std::string>;
  const std::lock_guard guard(mutex);
  if (said->insert(what).second) std::fprintf(stderr, "softcuda: %s\n", what.c_str());
}

}  // namespace softcuda

void softcuda_log(const char* text) {
  softcuda::log_once(text);
}
