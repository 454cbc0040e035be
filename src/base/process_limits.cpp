#include "base/process_limits.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/units.h"

namespace umem {
namespace {

class File {
 public:
  explicit File(const char* path) : fd_(open(path, O_RDONLY | O_CLOEXEC)) {}
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  std::size_t read_some(char* buffer, std::size_t size) const {
    const ssize_t n = read(fd_, buffer, size);
    return n > 0 ? static_cast<std::size_t>(n) : 0;
  }

 private:
  const int fd_;
};

std::size_t count_mappings() {
  const File maps("/proc/self/maps");
  char part[4096];
  std::size_t lines = 0;
  while (const std::size_t n = maps.read_some(part, sizeof part))
    lines += static_cast<std::size_t>(std::count(part, part + n, '\n'));
  return lines;
}

std::size_t max_mappings() {
  char text[32] = {};
  std::size_t count = 0;
  File("/proc/sys/vm/max_map_count").read_some(text, sizeof text - 1);
  return std::sscanf(text, "%zu", &count) == 1 ? count : 0;
}

// Bytes of address space, and of private writable memory.
struct Usage {
  std::size_t address_space = 0, data = 0;
};
Usage usage() {
  char text[128] = {};
  std::size_t pages = 0, data = 0;
  File("/proc/self/statm").read_some(text, sizeof text - 1);
  if (std::sscanf(text, "%zu %*u %*u %*u %*u %zu", &pages, &data) != 2) return {};
  const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return {pages * page_bytes, data * page_bytes};
}

struct Limit {
  const char *name, *option;
  std::size_t bytes, used;
  std::size_t room() const { return bytes - std::min(bytes, used); }
};
Limit limit_of(int resource, const char* name, const char* option, std::size_t used) {
  struct rlimit value = {RLIM_INFINITY, RLIM_INFINITY};
  getrlimit(resource, &value);
  return {name, option, value.rlim_cur, used};
}
bool exists(const Limit& limit) {
  return limit.bytes != RLIM_INFINITY;
}

}  // namespace

std::size_t available_memory() {
  char text[256] = {};  // it is the third line
  std::size_t kib = 0;
  File("/proc/meminfo").read_some(text, sizeof text - 1);
  const char* line = std::strstr(text, "MemAvailable:");
  return line && std::sscanf(line, "MemAvailable: %zu", &kib) == 1 ? kib << 10 : 0;
}

bool exceeds_data_limit(std::size_t bytes) {
  const Limit data = limit_of(RLIMIT_DATA, "", "", 0);
  return exists(data) && usage().data + bytes > data.bytes;
}

const char* describe_reached_limit(char* text, std::size_t size, std::size_t wanted) {
  // A move needs a few mappings more than it leaves.
  static constexpr std::size_t kSpare = 8;
  const std::size_t mappings = count_mappings(), most = max_mappings();
  if (most == 0) {
    std::snprintf(text, size, "the kernel refused memory; /proc, which says why, cannot be read");
    return text;
  }
  if (mappings + kSpare >= most) {
    std::snprintf(text, size, "the process has %zu mappings, and vm.max_map_count is %zu", mappings,
                  most);
    return text;
  }
  const Usage used = usage();
  const Limit addresses = limit_of(RLIMIT_AS, "RLIMIT_AS", "-v", used.address_space);
  const Limit data = limit_of(RLIMIT_DATA, "RLIMIT_DATA", "-d", used.data);
  const Limit& least = data.room() < addresses.room() ? data : addresses;
  // A large allocation is refused while there is still some room.
  if (exists(least) && least.room() < std::max(least.bytes / 2, wanted))
    std::snprintf(text, size, "%s (ulimit %s) is %zu MiB, and the process has %zu MiB", least.name,
                  least.option, least.bytes >> 20, least.used >> 20);
  else
    std::snprintf(text, size, "the kernel refused memory, and no limit of the process is reached");
  return text;
}

}  // namespace umem
