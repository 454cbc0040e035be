// Streams, events, and the schedule of the work enqueued on them.
//
// Every operation of a stream has a ticket; it may run once the stream's earlier ones have and the
// tickets it depends on (event waits, the legacy stream's rules) are reached. Without a seed
// everything that may run does so when enqueued. With one, it runs at a random later moment, at the
// latest when the program waits for it, in a random permitted order: a program that forgot to wait
// sees old bytes.
//
// libcuda's worker may or may not take hints in the order of their calls, so there are both modes
// (SOFTCUDA_HINTS): one worker, where a waiting hint delays all later ones, on any stream; and
// hints as work of their streams alone.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "driver/types.h"
#include "races.h"

namespace softcuda {

using namespace umem::cu;  // NOLINT: the driver's own vocabulary

inline constexpr CUresult kCaptureUnsupported = static_cast<CUresult>(900);
inline constexpr CUresult kCaptureInvalidated = static_cast<CUresult>(901);
inline constexpr CUresult kCaptureUnmatched = static_cast<CUresult>(903);
inline constexpr CUresult kCapturedEvent = static_cast<CUresult>(907);
inline constexpr CUresult kCaptureImplicit = static_cast<CUresult>(906);
inline constexpr CUresult kCaptureWrongThread = static_cast<CUresult>(908);

struct Stream;
struct Capture;
using StreamRef = std::shared_ptr<Stream>;

// A moment of a stream: its operations up to `ticket` have run.
struct Moment {
  StreamRef stream;
  std::uint64_t ticket = 0;
  bool reached() const;
};

using Work = std::function<CUresult()>;

// A hint on managed memory, executed by the driver's one worker; one to the host blocks its caller
// instead if the stream is idle.
enum class Hint : unsigned char { kNone, kWorker, kCaller };

struct Operation {
  Work work;
  std::vector<Moment> after;
  bool host_function = false;  // it may take the program's locks
  Accesses accesses = {};
  KnownRef known = {};  // a host function's, and that of the write of a word
  Hint hint = Hint::kNone;
  std::uint64_t arrival = 0;  // a worker's hint: its number
  bool waits = false;         // for what other streams or processes do
  FlagRef flag = {};          // or for a word

  bool on_own_thread() const { return host_function || waits; }
};

struct Stream {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  std::deque<Operation> queue;
  std::uint64_t issued = 0, completed = 0;
  bool busy = false;  // a host function runs, or what waits
  FlagRef flag;       // for which the running operation waits
  std::vector<Moment> waits;
  std::shared_ptr<Capture> capture;
  Strand strand;

  bool blocking() const { return (flags & CU_STREAM_NON_BLOCKING) == 0; }
};

struct Event {
  int device = 0;
  unsigned flags = 0;
  bool recorded = false;
  Moment at;
  std::shared_ptr<std::int64_t> nanoseconds;
  std::shared_ptr<Capture> capture;
  KnownRef known;  // what its wait tells; null before the first record
};

// A stream's handle with 0, 1 (legacy) and 2 (per thread) resolved; null if it does not exist.
StreamRef find_stream(CUstream handle);
std::shared_ptr<Event> find_event(CUevent handle);
CUstream add_stream(int device, unsigned flags, int priority);
bool remove_stream(CUstream handle);
CUevent add_event(int device, unsigned flags);
bool remove_event(CUevent handle);

// Takes the lock, and enqueues on the stream of that handle.
CUresult enqueue_on(CUstream handle, Work work, Accesses accesses = {}, bool waits = false);
CUresult enqueue_host_function(CUstream handle, Work work);

// Around fork: the child's copy is consistent because no thread was inside.
void lock_for_fork();
void unlock_after_fork();

// All below with the lock held. `wait` releases it while nothing new can run.
std::unique_lock<std::mutex> lock_work();
// Enqueues on the stream, or adds a node to the graph it captures. The result is the work's own if
// it ran immediately.
CUresult enqueue(const StreamRef& stream, Operation operation);
CUresult record(Event& event, const StreamRef& stream);
CUresult wait_event(const StreamRef& stream, const Event& event);
Moment now(const StreamRef& stream);
void wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done);
void wait_stream(std::unique_lock<std::mutex>& lock, const StreamRef& stream);
// The work of one device's streams, or with -1 of all.
void wait_device(std::unique_lock<std::mutex>& lock, int device);
// Polling runs something if anything may run, so that a polling loop ends.
void poll();
// Looks at the words for which streams wait now.
void see_flags();
void see(Flag& flag);  // with its value; in words.cpp
void judge_streams();
std::uint64_t pending();
bool deferred();
void set_seed(std::uint64_t seed);
std::uint64_t async_errors();

}  // namespace softcuda
