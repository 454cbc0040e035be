// A system that refuses a thread: an error that says so, and a later attempt works.
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "engine/lane.h"
#include "expect.h"
#include "managed/freer.h"

namespace {

using namespace umem;  // NOLINT: a test program

// Threads of the user, which are counted; 0: no more.
void allow(rlim_t threads) {
  rlimit limit{};
  EXPECT(getrlimit(RLIMIT_NPROC, &limit) == 0);
  limit.rlim_cur = threads;
  EXPECT(setrlimit(RLIMIT_NPROC, &limit) == 0);
}

bool names_the_limit(const Status& status) {
  return status.code() == Code::kBadState &&
         status.message().find("ulimit -u") != std::string::npos;
}

}  // namespace

int main() {
  rlimit before{};
  EXPECT(getrlimit(RLIMIT_NPROC, &before) == 0);
  if (geteuid() == 0) EXPECT(setuid(65534) == 0);  // root has no limit

  driver::Table table;
  driver::fill_missing(table);
  table.cuStreamCreate = [](cu::CUstream*, unsigned) { return cu::CUDA_SUCCESS; };
  table.cuStreamDestroy = [](cu::CUstream) { return cu::CUDA_SUCCESS; };
  table.cuCtxSetCurrent = [](cu::CUcontext) { return cu::CUDA_SUCCESS; };
  int nothing = 0;
  driver::Place place;
  place.context = reinterpret_cast<cu::CUcontext>(&nothing);

  engine::Lane lane(table, place, true);
  managed::Freer freer(
      table, place, [](std::uint64_t) {}, [](std::uintptr_t) { return Status(); },
      [](std::size_t) {});
  allow(0);
  EXPECT(names_the_limit(lane.open()));
  EXPECT(lane.close().ok());
  EXPECT(names_the_limit(freer.open()));
  allow(before.rlim_cur);
  engine::Lane second(table, place, true);
  EXPECT(second.open().ok());
  EXPECT(second.close().ok());
  EXPECT(freer.open().ok());
  freer.add(kPageBytes, kPageBytes);
  EXPECT(freer.drain().ok());
  freer.close();

  // Nothing is freed while a graph is captured, and nothing is lost.
  std::atomic<int> captures{1};
  place.captures = &captures;
  std::atomic<int> freed{0};
  managed::Freer waits(
      table, place, [](std::uint64_t) {}, [](std::uintptr_t) { return Status(); },
      [&](std::size_t) { ++freed; });
  EXPECT(waits.open().ok());
  waits.add(kPageBytes, kPageBytes);
  EXPECT(waits.drain().code() == Code::kBadState);
  EXPECT(freed == 0);
  captures = 0;
  EXPECT(waits.drain().ok());
  EXPECT(freed == 1);
  waits.close();

  // Memory that the driver refuses once is freed by the next attempt.
  std::atomic<bool> refuses{true};
  managed::Freer retries(
      table, place, [](std::uint64_t) {},
      [&](std::uintptr_t) { return refuses ? Status(Code::kDriver, "refused") : Status(); },
      [&](std::size_t) { ++freed; });
  EXPECT(retries.open().ok());
  retries.add(kPageBytes, kPageBytes);
  EXPECT(retries.drain().code() == Code::kDriver);
  EXPECT(retries.wait().code() == Code::kDriver);
  refuses = false;
  EXPECT(retries.drain().ok());
  EXPECT(freed == 2);
  retries.close();
  return g_wrong != 0;
}
