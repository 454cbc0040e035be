// Stream capture, as far as an allocator can notice it: what a capturing stream is given becomes a
// node, and calls that are unsafe meanwhile fail and spoil the capture.
#pragma once
#include <vector>

#include "work.h"

namespace softcuda {

enum class CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

struct Capture {
  std::uint64_t id = 0;
  CaptureMode mode = CaptureMode::kGlobal;
  std::thread::id thread;
  std::vector<Work> nodes;
  Accesses accesses;  // of all nodes
  bool invalid = false;
};
struct Graph {
  std::vector<Work> nodes;
  Accesses accesses;
};

// With the work lock held.
CUresult begin_capture(const StreamRef& stream, CaptureMode mode);
CUresult end_capture(const StreamRef& stream, Graph** graph);
// The result of a call that may not be made while something captures (allocation, synchronous
// calls, event queries): CUDA_SUCCESS where the thread's mode allows it.
CUresult check_unsafe();
// For calls on one stream that can be neither captured nor made while it captures.
CUresult check_not_capturing(const StreamRef& stream);
CaptureMode exchange_mode(CaptureMode mode);

}  // namespace softcuda
