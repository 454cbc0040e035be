// torch requests figures with the interpreter's lock held. Another thread may hold a device's lock
// while it waits for the device, which may wait for a Python callback of the program.
#pragma once
#include <Python.h>

#include <optional>

#include "python/lock.h"

namespace umem::torch_ext {

// Without the interpreter's lock, where the thread has it.
class Unlocked {
 public:
  Unlocked() {
    if (Py_IsInitialized() && PyGILState_Check()) released_.emplace();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  std::optional<python::Unlocked> released_;
};

}  // namespace umem::torch_ext
