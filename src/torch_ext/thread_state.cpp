#include "torch_ext/thread_state.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>

namespace umem::torch_ext {
namespace {

thread_local bool t_ended = false;

// Never destroyed: threads may outlive static objects.
struct Registry {
  std::mutex mutex;
  std::vector<ThreadState*> live;
  ObserverCounters ended;
};
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

void add(ObserverCounters& sum, const ThreadState& state) {
  sum.ops += state.ops.value();
  sum.ignored += state.ignored.value();
  sum.inputs += state.inputs.value();
}

struct Owner {
  // On the heap: the block of static TLS is small.
  std::unique_ptr<ThreadState> held = std::make_unique<ThreadState>();
  ThreadState& state = *held;
  Owner() {
    state.inputs_of_op.reserve(256);
    Registry& all = registry();
    std::lock_guard guard(all.mutex);
    all.live.push_back(&state);
  }
  ~Owner() {
    t_ended = true;
    t_state = nullptr;
    while (ThreadState::Free* record = state.free_records) {
      state.free_records = record->next;
      ::operator delete(record);
    }
    Registry& all = registry();
    std::lock_guard guard(all.mutex);
    add(all.ended, state);
    std::erase(all.live, &state);
  }
};

}  // namespace

thread_local constinit ThreadState* t_state = nullptr;

ThreadState* make_thread_state() {
  if (t_ended) return nullptr;
  thread_local Owner owner;
  return t_state = owner.held.get();
}

ObserverCounters sum_counters() {
  Registry& all = registry();
  std::lock_guard guard(all.mutex);
  ObserverCounters sum = all.ended;
  for (const ThreadState* state : all.live) add(sum, *state);
  return sum;
}

void lock_threads_for_fork() {
  registry().mutex.lock();
}

void unlock_threads_after_fork() {
  registry().mutex.unlock();
}

}  // namespace umem::torch_ext
