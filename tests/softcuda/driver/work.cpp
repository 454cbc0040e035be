#include "work.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <random>
#include <unordered_map>

#include "capture.h"
#include "config.h"
#include "devices.h"
#include "probes.h"
#include "softcuda.h"
#include "vmm.h"

namespace softcuda {
namespace {

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::unordered_map<void*, StreamRef> streams;
  std::unordered_map<void*, std::shared_ptr<Event>> events;
  std::vector<StreamRef> all;  // with destroyed streams whose work has not run
  std::vector<StreamRef> legacy;
  std::uint64_t seed = config().seed;
  std::mt19937_64 random{config().seed};
  std::uint64_t failures = 0;
  std::uint64_t hints_called = 0, hints_done = 0;  // the worker's

  bool one_worker() const {
    return config().hints == Hints::kWorker || (config().hints == Hints::kBoth && seed % 2 == 1);
  }

  State() {
    for (int device = 0; device < config().devices; ++device) legacy.push_back(make(device, 0, 0));
  }
  StreamRef make(int device, unsigned flags, int priority) {
    auto stream = std::make_shared<Stream>();
    stream->device = device;
    stream->flags = flags;
    stream->priority = priority;
    all.push_back(stream);
    return stream;
  }
};

State& state() {
  static auto* instance = new State;  // never destroyed: streams are used during exit
  return *instance;
}

bool runnable(const Stream& stream) {
  if (stream.busy || stream.queue.empty()) return false;
  const Operation& next = stream.queue.front();
  if (next.arrival > state().hints_done + 1) return false;
  const auto& after = next.after;
  return std::all_of(after.begin(), after.end(), [](const Moment& m) { return m.reached(); });
}

bool run_one();

void run_all_runnable() {
  while (run_one()) {
  }
}

void run_on_own_thread(const StreamRef& stream, Work work) {
  stream->busy = true;
  std::thread([stream, work = std::move(work)] {
    work();
    const std::lock_guard guard(state().mutex);
    if (stream->flag) see(*stream->flag);
    stream->flag = nullptr;
    stream->busy = false;
    ++stream->completed;
    if (state().seed == 0) run_all_runnable();
    state().changed.notify_all();
  }).detach();
}

// Runs the first operation of one stream, chosen at random. False if nothing may run now.
bool run_one() {
  State& s = state();
  std::vector<StreamRef> ready;
  std::copy_if(s.all.begin(), s.all.end(), std::back_inserter(ready),
               [](const StreamRef& stream) { return runnable(*stream); });
  if (ready.empty()) return false;
  const StreamRef stream = ready[s.random() % ready.size()];
  Operation operation = std::move(stream->queue.front());
  stream->queue.pop_front();
  if (operation.flag && (operation.flag->seen || operation.flag->satisfied())) {
    see(*operation.flag);
    ++stream->completed;
    return true;
  }
  if (operation.on_own_thread()) {
    if (operation.host_function) races().host_knows(operation.known->clock);
    stream->flag = operation.flag;
    run_on_own_thread(stream, std::move(operation.work));
    return true;
  }
  if (operation.work() != CUDA_SUCCESS) ++s.failures;
  if (operation.arrival > 0) ++s.hints_done;
  ++stream->completed;
  return true;
}

bool idle(const Stream& stream, const Operation& next) {
  return stream.queue.empty() && !stream.busy && next.after.empty();
}

void forget_drained() {
  State& s = state();
  std::erase_if(s.all, [](const StreamRef& stream) {
    const bool gone = stream.use_count() == 1 && stream->queue.empty() && !stream->busy;
    if (gone) races().stream_is_gone(stream->strand);
    return gone;
  });
}

// Streams that the legacy stream's rules put before `stream`.
template <class Visit>
void for_streams_before(const StreamRef& stream, Visit visit) {
  const StreamRef& legacy = state().legacy[static_cast<std::size_t>(stream->device)];
  if (stream == legacy) {
    for (const StreamRef& other : state().all)
      if (other != legacy && other->device == stream->device && other->blocking()) visit(other);
  } else if (stream->blocking()) {
    visit(legacy);
  }
}

void add_implicit_order(const StreamRef& stream, std::vector<Moment>& after) {
  for_streams_before(stream, [&](const StreamRef& other) { after.push_back(now(other)); });
  std::erase_if(after, [](const Moment& m) { return m.reached(); });
}

void enter_operation(const StreamRef& stream, Operation& operation) {
  Strand& strand = stream->strand;
  for_streams_before(stream, [&](const StreamRef& other) { follow(strand, other->strand); });
  Judgement judgement{std::move(operation.accesses), {}, operation.flag, {}};
  if (operation.known) judgement.results.push_back(operation.known);
  enter(strand, std::move(judgement));
}

// The device checks addresses when the work runs.
void check_addresses(Operation& operation, int device) {
  if (!touches_reserved(operation.accesses)) return;
  operation.work = [work = std::move(operation.work), accesses = operation.accesses, device] {
    const Access* illegal = find_illegal(accesses, device);
    if (!illegal) return work();
    std::fprintf(stderr, "softcuda: %s uses 0x%zx+%zu, which device %d may not: illegal address\n",
                 illegal->name, illegal->begin, illegal->end - illegal->begin, device);
    lose_device(CUDA_ERROR_ILLEGAL_ADDRESS);
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  };
}

}  // namespace

bool Moment::reached() const {
  return !stream || stream->completed >= ticket;
}

std::unique_lock<std::mutex> lock_work() {
  return std::unique_lock(state().mutex);
}

void lock_for_fork() {
  state().mutex.lock();
}
void unlock_after_fork() {
  state().mutex.unlock();
}

StreamRef find_stream(CUstream handle) {
  const auto key = reinterpret_cast<std::uintptr_t>(handle);
  const auto device = static_cast<std::size_t>(std::max(0, current_device()));
  if (key <= 1) return state().legacy[device];
  if (key == 2) {
    thread_local std::vector<StreamRef> mine(static_cast<std::size_t>(config().devices));
    if (!mine[device]) mine[device] = state().make(static_cast<int>(device), 0, 0);
    return mine[device];
  }
  const auto found = state().streams.find(handle);
  return found == state().streams.end() ? nullptr : found->second;
}

std::shared_ptr<Event> find_event(CUevent handle) {
  const auto found = state().events.find(handle);
  return found == state().events.end() ? nullptr : found->second;
}

CUstream add_stream(int device, unsigned flags, int priority) {
  const StreamRef stream = state().make(device, flags, priority);
  state().streams.emplace(stream.get(), stream);
  return reinterpret_cast<CUstream>(stream.get());
}

bool remove_stream(CUstream handle) {
  const bool found = state().streams.erase(handle) == 1;
  forget_drained();
  return found;
}

CUevent add_event(int device, unsigned flags) {
  auto event = std::make_shared<Event>();
  event->device = device;
  event->flags = flags;
  event->nanoseconds = std::make_shared<std::int64_t>(0);
  const auto handle = reinterpret_cast<CUevent>(event.get());
  state().events.emplace(handle, std::move(event));
  return handle;
}

bool remove_event(CUevent handle) {
  return state().events.erase(handle) == 1;
}

Moment now(const StreamRef& stream) {
  return {stream, stream->issued};
}

CUresult enqueue(const StreamRef& stream, Operation operation) {
  check_addresses(operation, stream->device);
  if (stream->capture) {
    if (stream->capture->invalid) return kCaptureInvalidated;
    stream->capture->nodes.push_back(std::move(operation.work));
    Accesses& accesses = stream->capture->graph.accesses;
    accesses.insert(accesses.end(), operation.accesses.begin(), operation.accesses.end());
    return CUDA_SUCCESS;
  }
  enter_operation(stream, operation);
  operation.after = std::move(stream->waits);
  stream->waits.clear();
  add_implicit_order(stream, operation.after);
  ++stream->issued;
  State& s = state();
  if (s.seed != 0 && operation.hint != Hint::kNone && s.one_worker()) {
    if (operation.hint == Hint::kCaller && idle(*stream, operation)) {
      ++stream->completed;
      return operation.work();
    }
    operation.arrival = ++s.hints_called;
  }
  if (s.seed != 0) {
    stream->queue.push_back(std::move(operation));
    s.changed.notify_all();  // it may write the word that others wait for
    // A device may also be early.
    if (s.random() % 4 == 0) poll();
    return CUDA_SUCCESS;
  }
  // An immediate failure is the call's own result; behind a host function it comes too late for
  // that.
  auto result = std::make_shared<CUresult>(CUDA_SUCCESS);
  if (!operation.on_own_thread())
    operation.work = [work = std::move(operation.work), result] { return *result = work(); };
  stream->queue.push_back(std::move(operation));
  const std::uint64_t failures = s.failures;
  run_all_runnable();
  if (*result != CUDA_SUCCESS) s.failures = failures;
  return *result;
}

CUresult enqueue_on(CUstream handle, Work work, Accesses accesses, bool waits) {
  const auto lock = lock_work();
  const StreamRef stream = find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  Operation operation{std::move(work), {}, false, std::move(accesses)};
  operation.waits = waits;
  return enqueue(stream, std::move(operation));
}

CUresult enqueue_host_function(CUstream handle, Work work) {
  const auto lock = lock_work();
  const StreamRef stream = find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  Operation operation{std::move(work), {}, true};
  operation.known = std::make_shared<Known>();
  return enqueue(stream, std::move(operation));
}

void judge_streams() {
  bool any = true;
  while (any) {
    any = false;
    for (const StreamRef& stream : state().all) any = judge(stream->strand) || any;
  }
}

CUresult record(Event& event, const StreamRef& stream) {
  if (stream->capture) {
    event.capture = stream->capture;
    event.recorded = true;
    return CUDA_SUCCESS;
  }
  event.capture = nullptr;
  event.recorded = true;
  event.nanoseconds = std::make_shared<std::int64_t>(0);  // an earlier record keeps its own
  Operation operation;
  operation.work = [stamp = event.nanoseconds] {
    *stamp = std::chrono::steady_clock::now().time_since_epoch().count();
    return CUDA_SUCCESS;
  };
  event.at = {stream, stream->issued + 1};
  const CUresult result = enqueue(stream, std::move(operation));
  event.known = known_after(stream->strand);
  return result;
}

void wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done) {
  while (!done()) {
    if (run_one()) continue;
    state().changed.wait(lock);
  }
}

namespace {
// The program knows afterwards what those moments tell.
void wait_for_all(std::unique_lock<std::mutex>& lock, const std::vector<Moment>& all,
                  const std::vector<KnownRef>& known) {
  wait(lock, [&] {
    return std::all_of(all.begin(), all.end(), [](const Moment& m) { return m.reached(); });
  });
  for (const KnownRef& each : known) races().host_knows(each->clock);
}
}  // namespace

void wait_stream(std::unique_lock<std::mutex>& lock, const StreamRef& stream) {
  // Waits that no operation follows are part of what the stream has been given.
  const std::vector<Moment> waits = stream->waits;
  Moment last = now(stream);
  const bool legacy = stream == state().legacy[static_cast<std::size_t>(stream->device)];
  std::vector<Moment> all = waits;
  all.push_back(last);
  std::vector<KnownRef> known = all_known_after(stream->strand);
  if (legacy) {
    add_implicit_order(stream, all);
    for_streams_before(
        stream, [&](const StreamRef& other) { known.push_back(known_after(other->strand)); });
  }
  wait_for_all(lock, all, known);
}

void wait_device(std::unique_lock<std::mutex>& lock, int device) {
  std::vector<Moment> all;
  std::vector<KnownRef> known{std::make_shared<Known>(Known{races().of_gone_streams(), true})};
  for (const StreamRef& stream : state().all) {
    if (device >= 0 && stream->device != device) continue;
    all.push_back(now(stream));
    known.push_back(known_after(stream->strand));
  }
  wait_for_all(lock, all, known);
}

void poll() {
  const std::uint64_t steps = 1 + state().random() % 3;
  for (std::uint64_t i = 0; i < steps && run_one(); ++i) {
  }
}

void see_flags() {
  for (const StreamRef& stream : state().all) {
    const FlagRef flag = stream->busy        ? stream->flag
                         : runnable(*stream) ? stream->queue.front().flag
                                             : nullptr;
    if (flag && flag->satisfied()) see(*flag);
  }
}

std::uint64_t pending() {
  std::uint64_t count = 0;
  for (const StreamRef& stream : state().all) count += stream->issued - stream->completed;
  return count;
}

bool deferred() {
  return state().seed != 0;
}

void set_seed(std::uint64_t seed) {
  auto lock = lock_work();
  wait_device(lock, -1);
  state().seed = seed;
  state().random.seed(seed);
}

std::uint64_t async_errors() {
  return state().failures;
}

}  // namespace softcuda

void softcuda_seed(std::uint64_t seed) {
  softcuda::set_seed(seed);
}
std::uint64_t softcuda_pending() {
  const auto lock = softcuda::lock_work();
  return softcuda::pending();
}
std::uint64_t softcuda_async_errors() {
  const auto lock = softcuda::lock_work();
  return softcuda::async_errors();
}
