// Faults of a disk: the n-th call fails, transfers less than asked, or does something else than it
// says, and all may be late.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <utility>

#include "bindings/bind.h"
#include "core_testing/testing.h"
#include "soft/disk_calls.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

enum Call { kRead, kWrite, kReserve, kCalls };

struct Fault {
  std::string kind;
  bool once;  // the call that follows on the same thread, which tries again, does not fail
};

struct Faults {
  std::mutex mutex;
  std::array<std::uint64_t, kCalls> calls{};
  std::array<std::map<std::uint64_t, Fault>, kCalls> planned;
  unsigned delay_us = 0;
  bool random_delay = false;
  std::minstd_rand random;
};

Faults& faults() {
  static auto* const all = new Faults;  // the disk's threads may outlive the interpreter
  return *all;
}

constinit thread_local bool t_failed = false;

// The planned fault of this call; empty: none.
std::string next_fault(Call call) {
  Faults& all = faults();
  unsigned late = 0;
  std::string kind;
  {
    const std::lock_guard lock(all.mutex);
    const std::uint64_t nth = ++all.calls[call];
    const bool failed = std::exchange(t_failed, false);
    if (const auto found = all.planned[call].find(nth); found != all.planned[call].end()) {
      if (failed && found->second.once) {
        all.planned[call].try_emplace(nth + 1, found->second);
      } else {
        kind = found->second.kind;
        t_failed = true;
      }
    }
    late = all.delay_us > 0 && all.random_delay ? static_cast<unsigned>(all.random() % all.delay_us)
                                                : all.delay_us;
  }
  if (late > 0) usleep(late);
  return kind;
}

ssize_t failed(int error) {
  errno = error;
  return -1;
}

ssize_t write(int file, const void* from, std::size_t bytes, off_t at) {
  const std::string kind = next_fault(kWrite);
  if (kind == "EIO") return failed(EIO);
  if (kind == "ENOSPC") return failed(ENOSPC);
  const std::size_t written = kind == "short" || kind == "torn" ? bytes / 2 : bytes;
  const ssize_t n = syscall(SYS_pwrite64, file, from, written, at);
  return kind == "torn" ? static_cast<ssize_t>(bytes) : n;
}

ssize_t read(int file, void* to, std::size_t bytes, off_t at) {
  const std::string kind = next_fault(kRead);
  if (kind == "EIO") return failed(EIO);
  const ssize_t n = syscall(SYS_pread64, file, to, kind == "short" ? bytes / 2 : bytes, at);
  if (kind == "flip") static_cast<char*>(to)[bytes / 3] ^= 1;
  return n;
}

int reserve(int file, off_t at, off_t bytes) {
  const bool full = next_fault(kReserve) == "ENOSPC";  // file systems give all that they have
  const int error = syscall(SYS_fallocate, file, 0, at, full ? bytes / 2 : bytes) == 0 ? 0 : errno;
  return full ? ENOSPC : error;
}

Call call_of(const std::string& name) {
  constexpr std::array names{"read", "write", "reserve"};
  const auto* const found = std::find(names.begin(), names.end(), name);
  if (found == names.end())
    raise_if_error(Status(Code::kInvalidArgument, "the disk has no call " + name));
  return static_cast<Call>(found - names.begin());
}

void clear() {
  Faults& all = faults();
  const std::lock_guard lock(all.mutex);
  all.calls.fill(0);
  for (auto& planned : all.planned) planned.clear();
  all.delay_us = 0;
}

}  // namespace

void bind_disk(py::module_& module) {
  py::module_ m = module.def_submodule("disk", "Faults of the disk that evicted memory is on.");
  m.def(
      "fail",
      [](const std::string& call, std::uint64_t nth, const std::string& kind, bool once) {
        soft::set_disk_calls({write, read, reserve});
        const std::lock_guard lock(faults().mutex);
        const Call which = call_of(call);
        faults().planned[which][faults().calls[which] + nth] = {kind, once};
      },
      py::arg(), py::arg(), py::arg(), py::kw_only(), py::arg("once") = false);
  m.def("delay", [](unsigned us, unsigned seed) {
    soft::set_disk_calls({write, read, reserve});
    const std::lock_guard lock(faults().mutex);
    faults().delay_us = us;
    faults().random_delay = seed > 0;
    faults().random.seed(seed);
  });
  m.def("clear", &clear);
}

}  // namespace umem::bindings
