// Stream capture, as far as an allocator can notice it: a capturing stream's work becomes a node,
// and calls that are unsafe meanwhile fail and invalidate the capture.
#pragma once
#include <memory>
#include <vector>

#include "graph.h"
#include "work.h"

namespace softcuda {

enum class CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

struct Capture {
  // Into a new graph, or behind the nodes of `existing`.
  explicit Capture(Graph* existing)
      : own(existing ? nullptr : std::make_unique<Graph>()),
        graph(existing ? *existing : *own),
        nodes(graph.nodes) {}

  std::uint64_t id = 0;
  CaptureMode mode = CaptureMode::kGlobal;
  std::thread::id thread;
  std::unique_ptr<Graph> own;  // the program's when the capture has ended
  Graph& graph;
  std::vector<Work>& nodes;
  bool invalid = false;
};

// With the work lock held.
CUresult begin_capture(const StreamRef& stream, CaptureMode mode, Graph* existing = nullptr);
// `graph` may be null where the program has the graph already.
CUresult end_capture(const StreamRef& stream, Graph** graph);
// The result of a call that is forbidden during a capture (allocation, synchronous calls, event
// queries): CUDA_SUCCESS if the thread's mode allows it.
CUresult check_unsafe();
// For a call that waits for all streams of a device: in no mode of the thread while one captures.
CUresult check_no_capture(int device);
// True for the legacy stream while a stream that waits for it captures.
bool implicates_legacy(const StreamRef& stream);
// For calls on one stream that can neither be captured nor be made while it captures.
CUresult check_not_capturing(const StreamRef& stream);
CaptureMode exchange_mode(CaptureMode mode);

}  // namespace softcuda
