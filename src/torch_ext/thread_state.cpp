#include "torch_ext/thread_state.h"

#include <memory>
#include <new>

namespace umem::torch_ext {
namespace {

thread_local bool t_ended = false;

struct Owner {
  // On the heap: the block of static TLS is small.
  std::unique_ptr<ThreadState> held = std::make_unique<ThreadState>();
  Owner() { held->inputs_of_op.reserve(256); }
  ~Owner() {
    t_ended = true;
    t_state = nullptr;
    while (ThreadState::Free* record = held->free_records) {
      held->free_records = record->next;
      ::operator delete(record);
    }
  }
};

}  // namespace

thread_local constinit ThreadState* t_state = nullptr;

ThreadState* make_thread_state() {
  if (t_ended) return nullptr;
  thread_local Owner owner;
  return t_state = owner.held.get();
}

}  // namespace umem::torch_ext
