// The software device with a disk under several threads: each fills pages of its own, sends them
// out, fetches, discards and checks them, or takes their contents from a file, while the disk is
// late and fails now and then. Built with each sanitizer by tests/native/test_sanitizers.py.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/units.h"
#include "expect.h"
#include "soft/device.h"
#include "soft/disk_calls.h"

namespace {

using namespace umem;  // NOLINT: a test program

constexpr std::size_t kFrames = 24, kPages = 12;
constexpr int kThreads = 4;
constexpr cu::CUmemLocation kDevice{cu::CU_MEM_LOCATION_TYPE_DEVICE, 0};
constexpr cu::CUmemLocation kHost{cu::CU_MEM_LOCATION_TYPE_HOST, 0};

std::atomic<unsigned> g_calls{0};

constinit thread_local bool t_failed = false;

// Now and then, but not the second try, which would break the disk.
bool fails() {
  const unsigned nth = ++g_calls;
  if (nth % 3 == 0) usleep(nth * 7919 % 400);
  t_failed = nth % 50 == 0 && !t_failed;
  if (t_failed) errno = EIO;
  return t_failed;
}

ssize_t write(int file, const void* from, std::size_t bytes, off_t at) {
  return fails() ? -1 : syscall(SYS_pwrite64, file, from, bytes, at);
}

ssize_t read(int file, void* to, std::size_t bytes, off_t at) {
  return fails() ? -1 : syscall(SYS_pread64, file, to, bytes, at);
}

// A sanitizer notes a store before it is made: at a page that is being written to the disk, before
// the page fault that waits for that.
__attribute__((no_sanitize("thread"))) void store(cu::CUdeviceptr at, unsigned char value) {
  *reinterpret_cast<volatile unsigned char*>(at) = value;
}

unsigned char load(cu::CUdeviceptr at) {
  return *reinterpret_cast<volatile unsigned char*>(at);
}

constexpr off_t kSkew = 4095;  // bytes of the source before its first page

unsigned char value_in_source(std::size_t page) {
  return static_cast<unsigned char>(255 - page);
}

// A file with the contents of kPages pages.
std::string make_source(const std::string& folder) {
  std::string path = folder + "/source-XXXXXX";
  const int file = mkstemp(path.data());
  EXPECT(file >= 0);
  for (std::size_t page = 0; page < kPages; ++page) {
    const unsigned char value = value_in_source(page);
    const auto at = kSkew + static_cast<off_t>(page * kPageBytes);
    EXPECT(pwrite(file, &value, 1, at) == 1);
    EXPECT(pwrite(file, &value, 1, at + static_cast<off_t>(kPageBytes) - 1) == 1);
  }
  close(file);
  return path;
}

void run(driver::Driver& driver, const std::string& source, unsigned seed, int rounds) {
  driver::Table& table = driver.table;
  std::mt19937 random(seed);
  cu::CUdeviceptr base = 0;
  EXPECT(table.cuMemAllocManaged(&base, kPages * kPageBytes, cu::CU_MEM_ATTACH_GLOBAL) ==
         cu::CUDA_SUCCESS);
  std::array<unsigned char, kPages> values{};
  for (int round = 0; round < rounds; ++round) {
    const std::size_t page = random() % kPages;
    const std::size_t bytes = (1 + random() % (kPages - page)) * kPageBytes;
    const cu::CUdeviceptr ptr = base + page * kPageBytes;
    switch (random() % 7) {
      case 0:
        EXPECT(table.cuMemPrefetchAsync(ptr, bytes, kHost, 0, nullptr) == cu::CUDA_SUCCESS);
        break;
      case 1:
        (void)table.cuMemPrefetchAsync(ptr, bytes, kDevice, 0, nullptr);
        break;
      case 2:
        EXPECT(table.cuMemAdvise(ptr, bytes,
                                 random() % 2 ? cu::CU_MEM_ADVISE_SET_READ_MOSTLY
                                              : cu::CU_MEM_ADVISE_UNSET_READ_MOSTLY,
                                 kDevice) == cu::CUDA_SUCCESS);
        break;
      case 3:
        values[page] = static_cast<unsigned char>(1 + random() % 255);
        store(ptr, values[page]);
        store(ptr + kPageBytes - 1, values[page]);
        break;
      case 4:
        EXPECT(driver
                   .place_in_file(ptr, kPageBytes, source,
                                  kSkew + static_cast<std::uint64_t>(page * kPageBytes))
                   .ok());
        values[page] = value_in_source(page);
        break;
      default:
        if (values[page] == 0) break;  // never written
        EXPECT(load(ptr) == values[page]);
        EXPECT(load(ptr + kPageBytes - 1) == values[page]);
    }
  }
  EXPECT(table.cuMemFree(base) == cu::CUDA_SUCCESS);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 2000;
  const char* set = std::getenv("TMPDIR");
  const std::string folder = set ? set : ".";
  const std::string source = make_source(folder);
  soft::set_disk_calls({write, read, nullptr});
  driver::Driver driver;
  soft::Options options{kFrames * kPageBytes, soft::find_profile("a100-pcie4")};
  options.disk = folder;
  options.staging_bytes = 4 * kPageBytes;
  EXPECT(soft::open(options, driver).ok());
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] { run(driver, source, static_cast<unsigned>(i), rounds); });
  for (std::thread& thread : threads) thread.join();
  EXPECT(soft::close().ok());
  unlink(source.c_str());
  std::printf("%s: %d wrong\n", g_wrong ? "FAILED" : "ok", g_wrong.load());
  return g_wrong ? 1 : 0;
}
