// A driver call that does not return is named, together with a thread that waits for it; one that
// returns in time is not, and nothing is once the watchdog is off.
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "engine/lane.h"
#include "engine/watchdog.h"
#include "expect.h"

namespace {

using namespace umem;          // NOLINT: a test program
using namespace umem::engine;  // NOLINT: a test program

int g_stderr = -1;    // the read end of stderr
std::string g_text;   // the text read so far
std::size_t g_lines;  // that the prefetch waits for

std::size_t count(const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = 0; (at = g_text.find(part, at)) != std::string::npos; ++at) ++found;
  return found;
}

// Reads until there are this many lines, or for a minute; 0: the present ones.
void read_lines(std::size_t lines) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(lines > 0 ? 1 : 0);
  do {
    pollfd ready{g_stderr, POLLIN, 0};
    char buffer[4096];
    if (poll(&ready, 1, lines > 0 ? 100 : 0) == 1)
      g_text.append(buffer, static_cast<std::size_t>(read(g_stderr, buffer, sizeof buffer)));
  } while (count("\n") < lines && std::chrono::steady_clock::now() < end);
}

// Does not return before the watchdog has written this many lines.
cu::CUresult slow_call() {
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  if (g_lines > 0) read_lines(g_lines);
  return cu::CUDA_SUCCESS;
}

// A lane with a call that waits for the lines, and a thread that waits for that. Mapped memory
// waits for the work before it, where a prefetch of managed memory may.
void send_out(double patience, std::size_t lines, bool mapped = false) {
  g_lines = lines;
  g_text.clear();
  driver::Table table;
  driver::fill_missing(table);
  table.cuStreamCreate = [](cu::CUstream*, unsigned) { return cu::CUDA_SUCCESS; };
  table.cuStreamDestroy = [](cu::CUstream) { return cu::CUDA_SUCCESS; };
  table.cuEventCreate = [](cu::CUevent*, unsigned) { return cu::CUDA_SUCCESS; };
  table.cuEventRecord = [](cu::CUevent, cu::CUstream) { return cu::CUDA_SUCCESS; };
  table.cuEventQuery = [](cu::CUevent) { return cu::CUDA_SUCCESS; };
  table.cuEventDestroy = [](cu::CUevent) { return cu::CUDA_SUCCESS; };
  table.cuMemPrefetchBatchAsync = [](cu::CUdeviceptr*, std::size_t*, std::size_t,
                                     cu::CUmemLocation*, std::size_t*, std::size_t,
                                     unsigned long long, cu::CUstream) { return slow_call(); };
  table.cuEventSynchronize = [](cu::CUevent) { return slow_call(); };
  int nothing = 0;
  driver::Place place;
  place.device = 3;
  place.context = reinterpret_cast<cu::CUcontext>(&nothing);
  Watchdog::the().set_patience(patience);
  managed::MappedMemory memory(table);
  Lane lane(table, place, true, mapped ? &memory : nullptr);
  EXPECT(lane.open().ok());
  std::vector<managed::MemSpan> spans;
  if (!mapped) spans.push_back({kPageBytes, kPageBytes});
  const cu::CUevent work = reinterpret_cast<cu::CUevent>(&nothing);
  const Result<Ticket> ticket =
      lane.submit(Verb::kSendOut, spans, mapped ? std::vector{work} : std::vector<cu::CUevent>());
  EXPECT(ticket.ok());
  lane.issue_until(ticket.value());
  EXPECT(lane.close().ok());
  read_lines(0);
}

}  // namespace

int main() {
  int ends[2];
  EXPECT(pipe(ends) == 0);
  const int before = dup(STDERR_FILENO);
  dup2(ends[1], STDERR_FILENO);
  g_stderr = ends[0];

  send_out(0.02, 1);
  const std::string call = "device 3: the driver's call to evict memory to the host";
  const bool named = count(call) > 0;
  send_out(0.02, 1, true);
  const bool mapped_named = count(call) > 0;
  send_out(0.02, 2);  // again after ten times as long
  double first = 0, second = 0;
  const std::size_t at = g_text.find("for ");
  const std::size_t next = g_text.find("returned for ", at + 1);
  const bool twice = at != std::string::npos && next != std::string::npos;
  if (twice) {
    first = std::stod(g_text.substr(at + 4));
    second = std::stod(g_text.substr(next + 13));
  }
  send_out(3600, 0);
  const bool silent = g_text.empty();
  send_out(0, 0);  // off
  const bool off = g_text.empty();

  dup2(before, STDERR_FILENO);
  EXPECT(named && mapped_named);
  EXPECT(twice && second >= 9.9 * first);
  EXPECT(silent);
  EXPECT(off);
  return g_wrong != 0;
}
