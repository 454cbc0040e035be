// Python's interpreter lock (GIL), for threads that may outlive the interpreter.
//
// Before Python 3.14, pthread_exit unwinds a thread that requests the lock once the interpreter has
// ended. The unwinding passes destructors, which ends the process by std::terminate. Here such a
// thread waits forever, as it does in Python 3.14. It keeps the locks that it holds: take none that
// the end of the process needs around these objects.
#pragma once
#include <Python.h>
#include <unistd.h>

namespace umem::python {

// True if Python code can no longer run, nor the lock be taken.
inline bool interpreter_ended() {
  if (!Py_IsInitialized()) return true;
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

template <class Take>
auto take_lock(Take take) noexcept {
  try {
    return take();
  } catch (...) {  // the unwinding, which must not be continued
    while (true) pause();
  }
}

// Releases the lock while it lives.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    take_lock([this] { PyEval_RestoreThread(state_); });
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// Holds the lock while it lives, on any thread.
class Locked {
 public:
  Locked() : state_(take_lock(&PyGILState_Ensure)) {}
  ~Locked() { PyGILState_Release(state_); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace umem::python
