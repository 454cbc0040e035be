#include "capture.h"

#include <algorithm>

namespace softcuda {
namespace {

struct Active {
  StreamRef origin;
  std::shared_ptr<Capture> capture;
};
std::vector<Active>& active() {
  static auto* list = new std::vector<Active>;
  return *list;
}
std::vector<std::weak_ptr<Stream>>& joined() {
  static auto* list = new std::vector<std::weak_ptr<Stream>>;
  return *list;
}
std::uint64_t g_next_id = 1;
thread_local CaptureMode t_mode = CaptureMode::kGlobal;

bool forbids(const Capture& capture) {
  if (t_mode == CaptureMode::kRelaxed) return false;
  if (capture.thread == std::this_thread::get_id()) return capture.mode != CaptureMode::kRelaxed;
  return t_mode == CaptureMode::kGlobal && capture.mode == CaptureMode::kGlobal;
}

}  // namespace

CUresult begin_capture(const StreamRef& stream, CaptureMode mode, Graph* existing) {
  if (stream == find_stream(nullptr)) return kCaptureUnsupported;
  if (stream->capture) return CUDA_ERROR_INVALID_VALUE;
  auto capture = std::make_shared<Capture>(existing);
  capture->id = g_next_id++;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  stream->capture = capture;
  active().push_back({stream, capture});
  return CUDA_SUCCESS;
}

CUresult end_capture(const StreamRef& stream, Graph** graph) {
  if (graph) *graph = nullptr;
  const auto found = std::find_if(active().begin(), active().end(),
                                  [&](const Active& a) { return a.origin == stream; });
  if (found == active().end()) return kCaptureUnmatched;
  const std::shared_ptr<Capture> capture = found->capture;
  if (!graph && capture->own) return CUDA_ERROR_INVALID_VALUE;
  if (capture->mode != CaptureMode::kRelaxed && capture->thread != std::this_thread::get_id())
    return kCaptureWrongThread;
  active().erase(found);
  stream->capture = nullptr;
  for (const auto& weak : joined())
    if (const StreamRef other = weak.lock(); other && other->capture == capture)
      other->capture = nullptr;
  std::erase_if(joined(), [](const auto& weak) { return weak.expired() || !weak.lock()->capture; });
  if (capture->invalid) return kCaptureInvalidated;
  if (graph) *graph = capture->own ? capture->own.release() : &capture->graph;
  return CUDA_SUCCESS;
}

CUresult check_unsafe() {
  bool forbidden = false;
  for (const Active& a : active()) {
    if (!forbids(*a.capture)) continue;
    a.capture->invalid = true;
    forbidden = true;
  }
  return forbidden ? kCaptureUnsupported : CUDA_SUCCESS;
}

CUresult check_no_capture(int device) {
  bool forbidden = false;
  for (const Active& a : active())
    if (a.origin->device == device) forbidden = a.capture->invalid = true;
  return forbidden ? kCaptureUnsupported : CUDA_SUCCESS;
}

bool implicates_legacy(const StreamRef& stream) {
  return stream == find_stream(nullptr) &&
         std::any_of(active().begin(), active().end(), [&](const Active& a) {
           return a.origin->blocking() && a.origin->device == stream->device;
         });
}

CUresult check_not_capturing(const StreamRef& stream) {
  // The legacy stream would wait for every blocking stream, also for one that captures.
  if (stream == find_stream(nullptr)) {
    bool implicit = false;
    for (const Active& a : active())
      if (a.origin->blocking() && a.origin->device == stream->device)
        implicit = a.capture->invalid = true;
    return implicit ? kCaptureImplicit : CUDA_SUCCESS;
  }
  if (!stream->capture) return CUDA_SUCCESS;
  stream->capture->invalid = true;
  return kCaptureUnsupported;
}

CaptureMode exchange_mode(CaptureMode mode) {
  std::swap(mode, t_mode);
  return mode;
}

// Declared in work.h: the two rules of events that concern capture live here.
CUresult wait_event(const StreamRef& stream, const Event& event) {
  if (event.capture) {
    if (stream->capture == event.capture) return CUDA_SUCCESS;
    if (stream->capture || event.capture->invalid) return kCaptureInvalidated;
    stream->capture = event.capture;
    joined().push_back(stream);
    return CUDA_SUCCESS;
  }
  if (stream->capture) {
    // Work outside the capture cannot become a dependency of a node.
    stream->capture->invalid = true;
    return static_cast<CUresult>(905);  // STREAM_CAPTURE_ISOLATION
  }
  if (event.known) follow(stream->strand, event.known);
  if (event.recorded && !event.at.reached()) stream->waits.push_back(event.at);
  return CUDA_SUCCESS;
}

}  // namespace softcuda
