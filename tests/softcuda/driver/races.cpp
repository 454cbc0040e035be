#include "races.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <sstream>
#include <unordered_set>

#include "config.h"
#include "softcuda.h"
#include "work.h"

namespace softcuda {
namespace {

constexpr std::size_t kMostReports = 100;      // distinct pairs, until they are taken
constexpr std::size_t kMostSegments = 200000;  // pieces of memory with separate histories
constexpr int kExitWithRaces = 70;

std::atomic<pid_t> g_unread_in{0};  // the process whose reports were not taken

// A program that raced and did not take the reports fails, regardless of its own result.
struct FailUnread {
  ~FailUnread() {
    if (g_unread_in != getpid()) return;
    std::fprintf(stderr, "softcuda: races were found, and this program did not request them\n");
    std::fflush(nullptr);
    _exit(kExitWithRaces);
  }
};
const FailUnread g_fail_unread;

const char* verb(Use use) {
  switch (use) {
    case Use::kRead:
      return "reads";
    case Use::kWrite:
      return "writes";
    case Use::kMove:
      return "moves";
    case Use::kDiscard:
      return "discards";
    case Use::kFree:
      return "frees";
  }
  return "";
}

std::string place(StrandId strand) {
  return strand == kHost ? "on the host" : "on stream " + std::to_string(strand);
}

bool is_slow(Use a, Use b) {
  const auto data = [](Use use) { return use == Use::kRead || use == Use::kWrite; };
  return (a == Use::kMove && data(b)) || (b == Use::kMove && data(a));
}

bool harmless(Use a, Use b) {
  return (a == Use::kRead || a == Use::kMove) && a == b;
}

}  // namespace

const char* intern(std::string_view text) {
  static std::mutex mutex;
  static auto* texts = new std::unordered_set<std::string>;
  const std::lock_guard guard(mutex);
  return texts->emplace(text).first->c_str();
}

Races& races() {
  static auto* instance = new Races;  // never destroyed: streams are used during exit
  return *instance;
}

// Reuses the id of a destroyed, complete stream, so that clocks remain short: its ticks continue.
void Races::start(Strand& stream) {
  const auto found = std::find_if(spare_.begin(), spare_.end(), [this](const Gone& gone) {
    return host_.at(gone.id) >= gone.tick;
  });
  if (found == spare_.end()) {
    stream.id = ++last_id_;
    return;
  }
  stream.id = found->id;
  stream.clock.set(found->id, found->tick);
  spare_.erase(found);
}

void Races::enqueued(Strand& stream, const Accesses& accesses) {
  if (!config().races) return;
  if (stream.id == kHost) start(stream);
  const Tick tick = stream.clock.at(stream.id) + 1;
  stream.clock.join(host_);
  stream.clock.set(stream.id, tick);
  for (const Access& access : accesses) enter(access, stream.id, tick, stream.clock);
}

void Races::done_by_host(const Access& access) {
  if (!config().races) return;
  const Tick tick = host_.at(kHost) + 1;
  host_.set(kHost, tick);
  enter(access, kHost, tick, host_);
}

void Races::stream_is_gone(const Strand& stream) {
  gone_.join(stream.clock);
  if (stream.id != kHost) spare_.push_back({stream.id, stream.clock.at(stream.id)});
}

void Races::allocated(std::uintptr_t begin, std::size_t bytes) {
  shadow_.forget(begin, begin + bytes);
}

void Races::enter(const Access& access, StrandId strand, Tick tick, const Clock& clock) {
  const Mark mark{strand, tick, access.use, access.name};
  shadow_.enter(access, mark, clock,
                [&](const Mark& earlier, std::uintptr_t begin, std::uintptr_t end) {
                  judge(earlier, mark, begin, end);
                });
  bound();
}

void Races::judge(const Mark& earlier, const Mark& later, std::uintptr_t begin,
                  std::uintptr_t end) {
  if (harmless(earlier.use, later.use)) return;
  if (is_slow(earlier.use, later.use)) {
    ++slow_;
    log_once(std::string("slow: ") + earlier.name + ' ' + verb(earlier.use) + " what " +
             later.name + ' ' + verb(later.use) + ", and nothing orders them");
    return;
  }
  report(earlier, later, begin, end);
}

void Races::report(const Mark& earlier, const Mark& later, std::uintptr_t begin,
                   std::uintptr_t end) {
  const Key key{earlier.name, earlier.use, earlier.strand, later.name, later.use, later.strand};
  if (reports_.size() >= kMostReports || !reported_.insert(key).second) return;
  std::ostringstream text;
  text << earlier.name << ' ' << verb(earlier.use) << " 0x" << std::hex << begin << std::dec << '+'
       << end - begin << ' ' << place(earlier.strand) << ", " << later.name << ' '
       << verb(later.use) << " it " << place(later.strand)
       << (earlier.use == Use::kFree ? ": it is freed" : ": nothing orders them");
  reports_.push_back(text.str());
  std::fprintf(stderr, "softcuda: race: %s\n", reports_.back().c_str());
  g_unread_in = getpid();
}

void Races::bound() {
  if (shadow_.size() < prune_at_) return;
  shadow_.prune(host_);
  if (shadow_.size() > kMostSegments) {
    log_once("too much memory with unordered accesses: races with earlier ones are not found");
    shadow_.clear();
  }
  prune_at_ = std::max<std::size_t>(4096, 2 * shadow_.size());
}

std::string Races::take() {
  std::string text;
  for (const std::string& line : reports_) text += line + '\n';
  reports_.clear();
  reported_.clear();
  g_unread_in = 0;
  return text;
}

}  // namespace softcuda

const char* softcuda_races() {
  thread_local std::string text;
  const auto lock = softcuda::lock_work();
  text = softcuda::races().take();
  return text.c_str();
}
std::uint64_t softcuda_slow_moves() {
  const auto lock = softcuda::lock_work();
  return softcuda::races().slow();
}
std::size_t softcuda_race_segments() {
  const auto lock = softcuda::lock_work();
  return softcuda::races().size();
}
