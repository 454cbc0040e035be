// The op observer: reports to the runtime each operator's reads, writes and purpose.
#pragma once
#include <c10/core/TensorImpl.h>

#include <memory>
#include <span>

#include "torch_ext/thread_state.h"

namespace umem::torch_ext {

// Both may be called twice; the second call does nothing.
void install_observer();
void remove_observer();

// Kernels that run without torch's dispatcher, such as those that torch.compile generates: each
// call is an op like any other.
struct KernelArgument {
  const c10::TensorImpl* tensor;
  bool written;  // and perhaps read
};

// True if the observer is installed; costs one load.
bool observing();
// Null if it is not. The record is passed to `end_kernel` on the same thread, after ops that began
// later.
std::unique_ptr<OpRecord> begin_kernel(const OpInfo& info,
                                       std::span<const KernelArgument> arguments);
void end_kernel(std::unique_ptr<OpRecord> record);

}  // namespace umem::torch_ext
