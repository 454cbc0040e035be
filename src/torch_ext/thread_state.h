// The observer's state per thread: op stack, scratch memory and recycled op records.
#pragma once
#include <ATen/record_function.h>
#include <c10/macros/Macros.h>

#include <cstddef>
#include <vector>

#include "runtime/op.h"
#include "torch_ext/op_info.h"

namespace umem::torch_ext {

struct OpRecord final : at::ObserverContext {
  runtime::Op op;
  OpKind kind = OpKind::kCompute;
  bool reads_tensors = false;
  bool feeds_grad = false;  // inside an AccumulateGrad node
  bool recorded = false;    // autograd keeps the history of its results
  OpRecord* parent = nullptr;

  // torch deletes records through the base class; these recycle them, so that an op costs no
  // malloc.
  static void* operator new(std::size_t bytes);
  static void operator delete(void* memory, std::size_t bytes) noexcept;
};

struct ThreadState {
  OpRecord* top = nullptr;
  std::vector<runtime::Input> inputs_of_op;  // that begins
  OpInfoCache names;
  struct Free {
    Free* next;
  };
  Free* free_records = nullptr;
};

// Trivial, so that reaching it costs no initialisation guard. Not in the static TLS block (15 ns an
// op less): that block is small, and loading fails where other libraries have used it up.
extern thread_local constinit ThreadState* t_state;
ThreadState* make_thread_state();

// Null when the thread is being torn down.
inline ThreadState* thread_state() {
  ThreadState* state = t_state;
  return C10_LIKELY(state != nullptr) ? state : make_thread_state();
}

inline void* OpRecord::operator new(std::size_t bytes) {
  ThreadState* state = t_state;
  if (C10_UNLIKELY(!state || !state->free_records)) return ::operator new(bytes);
  ThreadState::Free* record = state->free_records;
  state->free_records = record->next;
  return record;
}

inline void OpRecord::operator delete(void* memory, std::size_t) noexcept {
  ThreadState* state = t_state;
  if (C10_UNLIKELY(!state)) return ::operator delete(memory);
  auto* record = static_cast<ThreadState::Free*>(memory);
  record->next = state->free_records;
  state->free_records = record;
}

}  // namespace umem::torch_ext
