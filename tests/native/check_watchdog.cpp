// A driver call that does not return is named, beside a thread that waits for it; one that returns
// in time is not, and neither is anything once the watchdog is off.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "expect.h"
#include "residency/lane.h"
#include "residency/watchdog.h"

namespace {

using namespace umem;             // NOLINT: a test program
using namespace umem::residency;  // NOLINT: a test program

std::atomic<int> g_prefetch_ms{0};

cu::CUresult slow_prefetch(cu::CUdeviceptr*, std::size_t*, std::size_t, cu::CUmemLocation*,
                           std::size_t*, std::size_t, unsigned long long, cu::CUstream) {
  std::this_thread::sleep_for(std::chrono::milliseconds(g_prefetch_ms));
  return cu::CUDA_SUCCESS;
}

// What the process writes to stderr while `act` runs.
template <class Act>
std::string written(Act act) {
  int ends[2];
  EXPECT(pipe(ends) == 0);
  const int before = dup(STDERR_FILENO);
  dup2(ends[1], STDERR_FILENO);
  close(ends[1]);
  act();
  dup2(before, STDERR_FILENO);
  close(before);
  std::string text;
  char buffer[4096];
  for (ssize_t got = 0; (got = read(ends[0], buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<std::size_t>(got));
  close(ends[0]);
  return text;
}

// A lane whose prefetch takes `prefetch_ms`, and a thread that waits for it.
std::string send_out(double patience, int prefetch_ms) {
  g_prefetch_ms = prefetch_ms;
  driver::Table table;
  driver::fill_missing(table);
  table.cuStreamCreate = [](cu::CUstream*, unsigned) { return cu::CUDA_SUCCESS; };
  table.cuStreamDestroy = [](cu::CUstream) { return cu::CUDA_SUCCESS; };
  table.cuEventCreate = [](cu::CUevent*, unsigned) { return cu::CUDA_SUCCESS; };
  table.cuEventRecord = [](cu::CUevent, cu::CUstream) { return cu::CUDA_SUCCESS; };
  table.cuEventQuery = [](cu::CUevent) { return cu::CUDA_SUCCESS; };
  table.cuEventDestroy = [](cu::CUevent) { return cu::CUDA_SUCCESS; };
  table.cuMemPrefetchBatchAsync = slow_prefetch;
  int nothing = 0;
  driver::Place place;
  place.device = 3;
  place.context = reinterpret_cast<cu::CUcontext>(&nothing);
  Watchdog::the().set_patience(patience);
  return written([&] {
    Lane lane(table, place, true);
    EXPECT(lane.open().ok());
    const Result<Ticket> ticket = lane.submit(Verb::kSendOut, {{kPageBytes, kPageBytes}}, {});
    EXPECT(ticket.ok());
    lane.issue_until(ticket.value());
    EXPECT(lane.close().ok());
  });
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++found;
  return found;
}

}  // namespace

int main() {
  const std::string slow = send_out(0.05, 400);
  EXPECT(count(slow, "device 3: the driver's call to evict memory to the host") == 1);
  EXPECT(count(slow, "warning") == 1);
  const std::string slower = send_out(0.02, 1500);  // again after ten times as long
  EXPECT(count(slower, "warning") >= 2);
  EXPECT(send_out(30, 100).empty());
  EXPECT(send_out(0, 400).empty());
  return g_wrong != 0;
}
