// The recorder, with its lock.
#pragma once
#include <mutex>

#include "residency/tags.h"
#include "runtime/state.h"
#include "trace/recorder.h"

namespace umem::runtime {

class RecorderLock {
 public:
  explicit RecorderLock(State& s) : guard_(s.recorder) {}
  trace::Recorder* operator->() const { return &trace::recorder(); }

 private:
  std::lock_guard<std::mutex> guard_;
};

// The name of a family in traces; "" for none.
inline const char* family_name(residency::Family family) {
  return family == residency::Family::kNone ? "" : residency::name(family);
}

}  // namespace umem::runtime
