// The time of an op is that between its events, without inner ops and without the pauses in which
// umem makes room.
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "expect.h"
#include "trace/recorder.h"

namespace {

using namespace umem;         // NOLINT: a test program
using namespace umem::trace;  // NOLINT: a test program

float g_ms = 0;           // the time on the stream
std::size_t g_made = 0;   // events
std::size_t g_most = 99;  // that can be made
std::map<cu::CUevent, float> g_at;

cu::CUresult create(cu::CUevent* event, unsigned) {
  if (g_made == g_most) return cu::CUDA_ERROR_OUT_OF_MEMORY;
  *event = reinterpret_cast<cu::CUevent>(++g_made);
  return cu::CUDA_SUCCESS;
}

cu::CUresult destroy(cu::CUevent) {
  return cu::CUDA_SUCCESS;
}

cu::CUresult record(cu::CUevent event, cu::CUstream) {
  g_at[event] = g_ms;
  return cu::CUDA_SUCCESS;
}

cu::CUresult query(cu::CUevent) {
  return cu::CUDA_SUCCESS;
}

cu::CUresult elapsed(float* ms, cu::CUevent begin, cu::CUevent end) {
  *ms = g_at[end] - g_at[begin];
  return cu::CUDA_SUCCESS;
}

driver::Table fake_driver() {
  driver::Table table;
  table.cuEventCreate = create;
  table.cuEventDestroy = destroy;
  table.cuEventRecord = record;
  table.cuEventQuery = query;
  table.cuEventElapsedTime = elapsed;
  return table;
}

const driver::Table g_driver = fake_driver();
constexpr std::uintptr_t kBlock = 4096;

void begin(OpTimer& span, float ms) {
  g_ms = ms;
  const Used used{kBlock};
  span.enter();
  recorder().begin(span, &used, 1, 0, 0);
  recorder().time(span, g_driver, {}, nullptr);
  span.begin();
}

void end(OpTimer& span, const char* name, float ms, OpTimer* parent) {
  g_ms = ms;
  span.end();
  recorder().timed(span, nullptr, parent);
  recorder().end(span, name, nullptr, "");
}

void pause(OpTimer& span, float from, float to) {
  g_ms = from;
  recorder().pause(span, nullptr);
  g_ms = to;
  recorder().resume(span, nullptr);
}

// The times of the ops recorded since the start.
std::map<std::string, float> stop() {
  std::map<std::string, float> found;
  for (const Event& event : recorder().take(kPlan, true).events)
    if (event.kind == EventKind::kOp) found[event.name] = event.us;
  recorder().stop(kPlan);
  return found;
}

// An op from 0 to 10 ms that pauses from 1 to 4, around one from 5 to 9 that pauses from 6 to 8.
std::map<std::string, float> times() {
  recorder().start(kPlan, {{kBlock, 4096, "", "", 0}}, true);
  OpTimer outer, inner;
  begin(outer, 0);
  pause(outer, 1, 4);
  begin(inner, 5);
  pause(inner, 6, 8);
  end(inner, "inner", 9, &outer);
  end(outer, "outer", 10, nullptr);
  return stop();
}

// An op without a time, such as another thread's, that is logged first after a pause.
std::map<std::string, float> times_beside_an_untimed_op() {
  recorder().start(kPlan, {{kBlock, 4096, "", "", 0}}, true);
  OpTimer timed, other;
  begin(timed, 0);
  pause(timed, 1, 4);
  const Used used{kBlock};
  other.enter();
  recorder().begin(other, &used, 1, 0, 0);
  recorder().end(other, "other", nullptr, "");
  end(timed, "timed", 10, nullptr);
  return stop();
}

}  // namespace

int main() {
  const std::map<std::string, float> found = times();
  EXPECT(found.size() == 2);
  EXPECT(found.at("inner") == 2000);
  EXPECT(found.at("outer") == 3000);
  const std::map<std::string, float> beside = times_beside_an_untimed_op();
  EXPECT(beside.at("timed") == 7000);
  EXPECT(beside.at("other") < 0);
  g_most = g_made + 2;  // the pause of the outer op is not measured: its time is not known
  const std::map<std::string, float> unknown = times();
  EXPECT(unknown.at("outer") < 0);
  return g_wrong != 0;
}
