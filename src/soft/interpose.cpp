#include "soft/interpose.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "soft/fault_handler.h"

namespace umem::soft {
namespace {

// A window on buffers for the length of a scope, at whose end errno is the call's still.
class Access {
 public:
  enum Mode : bool { kReads, kWrites };
  Access(const iovec* parts, std::size_t count, Mode mode)
      : parts_(parts), count_(std::min(count, kMaxParts)) {
    for (std::size_t i = 0; i < count_ && !refused_; ++i) {
      const Window window = open_window(parts[i].iov_base, parts[i].iov_len, mode);
      open_[i] = window == Window::kOpen;
      refused_ = window == Window::kRefused;
    }
  }
  ~Access() {
    const int error = errno;
    for (std::size_t i = 0; i < count_; ++i)
      if (open_[i]) close_window(parts_[i].iov_base, parts_[i].iov_len);
    errno = error;
  }
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;

  bool refused() const { return refused_; }

 private:
  static constexpr std::size_t kMaxParts = 1024;  // IOV_MAX: the kernel refuses more

  const iovec* parts_;
  std::size_t count_;
  std::bitset<kMaxParts> open_;
  bool refused_ = false;
};

constexpr auto kReads = Access::kReads, kWrites = Access::kWrites;

// The window opens before the call, not after an EFAULT: a datagram that could not be delivered is
// gone, and pages that a direct read fills must not become another's meanwhile.
template <class Call>
ssize_t with_access(const iovec* parts, std::size_t count, Access::Mode mode, Call call) {
  const Access access(parts, count, mode);
  if (!access.refused()) return call();
  errno = ENOMEM;  // as where the kernel cannot pin the pages
  return -1;
}

// Of an array that the kernel refuses where it is negative.
std::size_t size_of(int count) {
  return static_cast<std::size_t>(std::max(count, 0));
}

iovec part(const void* buffer, std::size_t bytes) {
  return {const_cast<void*>(buffer), bytes};
}

template <class Call>
ssize_t with_access(const iovec& buffer, Access::Mode mode, Call call) {
  return with_access(&buffer, 1, mode, call);
}

ssize_t read_(int fd, void* p, std::size_t n) {
  return with_access(part(p, n), kWrites, [&] { return ::read(fd, p, n); });
}
ssize_t read_chk(int fd, void* p, std::size_t n, std::size_t) {
  return read_(fd, p, n);
}
ssize_t write_(int fd, const void* p, std::size_t n) {
  return with_access(part(p, n), kReads, [&] { return ::write(fd, p, n); });
}
ssize_t pread_(int fd, void* p, std::size_t n, off_t at) {
  return with_access(part(p, n), kWrites, [&] { return ::pread(fd, p, n, at); });
}
ssize_t pread_chk(int fd, void* p, std::size_t n, off_t at, std::size_t) {
  return pread_(fd, p, n, at);
}
ssize_t pwrite_(int fd, const void* p, std::size_t n, off_t at) {
  return with_access(part(p, n), kReads, [&] { return ::pwrite(fd, p, n, at); });
}
ssize_t recv_(int fd, void* p, std::size_t n, int flags) {
  return with_access(part(p, n), kWrites, [&] { return ::recv(fd, p, n, flags); });
}
ssize_t recv_chk(int fd, void* p, std::size_t n, std::size_t, int flags) {
  return recv_(fd, p, n, flags);
}
ssize_t recvfrom_(int fd, void* p, std::size_t n, int flags, sockaddr* from, socklen_t* length) {
  return with_access(part(p, n), kWrites,
                     [&] { return ::recvfrom(fd, p, n, flags, from, length); });
}
ssize_t recvfrom_chk(int fd, void* p, std::size_t n, std::size_t, int flags, sockaddr* from,
                     socklen_t* length) {
  return recvfrom_(fd, p, n, flags, from, length);
}
ssize_t send_(int fd, const void* p, std::size_t n, int flags) {
  return with_access(part(p, n), kReads, [&] { return ::send(fd, p, n, flags); });
}
ssize_t sendto_(int fd, const void* p, std::size_t n, int flags, const sockaddr* to,
                socklen_t length) {
  return with_access(part(p, n), kReads, [&] { return ::sendto(fd, p, n, flags, to, length); });
}
ssize_t readv_(int fd, const iovec* parts, int count) {
  return with_access(parts, size_of(count), kWrites, [&] { return ::readv(fd, parts, count); });
}
ssize_t writev_(int fd, const iovec* parts, int count) {
  return with_access(parts, size_of(count), kReads, [&] { return ::writev(fd, parts, count); });
}
ssize_t preadv_(int fd, const iovec* parts, int count, off_t at) {
  return with_access(parts, size_of(count), kWrites,
                     [&] { return ::preadv(fd, parts, count, at); });
}
ssize_t pwritev_(int fd, const iovec* parts, int count, off_t at) {
  return with_access(parts, size_of(count), kReads,
                     [&] { return ::pwritev(fd, parts, count, at); });
}
ssize_t preadv2_(int fd, const iovec* parts, int count, off_t at, int flags) {
  return with_access(parts, size_of(count), kWrites,
                     [&] { return ::preadv2(fd, parts, count, at, flags); });
}
ssize_t pwritev2_(int fd, const iovec* parts, int count, off_t at, int flags) {
  return with_access(parts, size_of(count), kReads,
                     [&] { return ::pwritev2(fd, parts, count, at, flags); });
}
ssize_t recvmsg_(int fd, msghdr* message, int flags) {
  return with_access(message->msg_iov, message->msg_iovlen, kWrites,
                     [&] { return ::recvmsg(fd, message, flags); });
}
ssize_t sendmsg_(int fd, const msghdr* message, int flags) {
  return with_access(message->msg_iov, message->msg_iovlen, kReads,
                     [&] { return ::sendmsg(fd, message, flags); });
}
// Where the kernel refuses a window these fail by themselves, and set the file's error.
std::size_t fread_(void* p, std::size_t size, std::size_t n, std::FILE* file) {
  const iovec buffer = part(p, size * n);
  const Access access(&buffer, 1, kWrites);
  return std::fread(p, size, n, file);
}
std::size_t fread_chk(void* p, std::size_t, std::size_t size, std::size_t n, std::FILE* file) {
  return fread_(p, size, n, file);
}
std::size_t fwrite_(const void* p, std::size_t size, std::size_t n, std::FILE* file) {
  const iovec buffer = part(p, size * n);
  const Access access(&buffer, 1, kReads);
  return std::fwrite(p, size, n, file);
}
int sigaction_(int number, const struct sigaction* action, struct sigaction* previous) {
  if (number == SIGSEGV) return chain_sigaction(action, previous);
  return ::sigaction(number, action, previous);
}
sighandler_t signal_(int number, sighandler_t handler) {
  if (number != SIGSEGV) return ::signal(number, handler);
  struct sigaction action = {}, previous = {};
  action.sa_handler = handler;
  chain_sigaction(&action, &previous);
  return previous.sa_handler;
}
struct Replacement {
  const char* name;
  void* function;
  void* in_python;  // in the interpreter itself
};
const Replacement* find(const char* name);

// What a program looks up by name is wrapped too (ctypes, cffi). Handles that stand for a place in
// the search order are dlsym's alone: it goes by its caller, so that has to be a tail call.
void* dlsym_(void* handle, const char* name) {
  if (handle == RTLD_NEXT || handle == RTLD_DEFAULT) return ::dlsym(handle, name);
  void* found = ::dlsym(handle, name);
  const Replacement* replacement = found ? find(name) : nullptr;
  return replacement && found == ::dlsym(RTLD_DEFAULT, name) ? replacement->function : found;
}
// Python asks for a module's PyInit function right after loading the module.
void* dlsym_in_python(void* handle, const char* name) {
  install_interposers();
  return dlsym_(handle, name);
}

template <class F>
Replacement replace(const char* name, F* function, F* in_python = nullptr) {
  if (!in_python) in_python = function;
  return {name, reinterpret_cast<void*>(function), reinterpret_cast<void*>(in_python)};
}
const Replacement kReplacements[] = {
    replace("read", read_),
    replace("__read_chk", read_chk),
    replace("write", write_),
    replace("pread", pread_),
    replace("pread64", pread_),
    replace("__pread_chk", pread_chk),
    replace("__pread64_chk", pread_chk),
    replace("pwrite", pwrite_),
    replace("pwrite64", pwrite_),
    replace("recv", recv_),
    replace("__recv_chk", recv_chk),
    replace("recvfrom", recvfrom_),
    replace("__recvfrom_chk", recvfrom_chk),
    replace("recvmsg", recvmsg_),
    replace("send", send_),
    replace("sendto", sendto_),
    replace("readv", readv_),
    replace("writev", writev_),
    replace("preadv", preadv_),
    replace("preadv64", preadv_),
    replace("pwritev", pwritev_),
    replace("pwritev64", pwritev_),
    replace("preadv2", preadv2_),
    replace("preadv64v2", preadv2_),
    replace("pwritev2", pwritev2_),
    replace("pwritev64v2", pwritev2_),
    replace("sendmsg", sendmsg_),
    replace("fread", fread_),
    replace("__fread_chk", fread_chk),
    replace("fwrite", fwrite_),
    replace("sigaction", sigaction_),
    replace("signal", signal_),
    replace("dlsym", dlsym_, dlsym_in_python),
};

#if defined(__x86_64__)
constexpr unsigned kJumpSlot = R_X86_64_JUMP_SLOT, kGlobalData = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr unsigned kJumpSlot = R_AARCH64_JUMP_SLOT, kGlobalData = R_AARCH64_GLOB_DAT;
#else
#error "the software device knows the relocations of x86-64 and aarch64 only"
#endif

bool holds(const dl_phdr_info& info, const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address) - info.dlpi_addr;
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = info.dlpi_phdr[i];
    if (header.p_type == PT_LOAD && at - header.p_vaddr < header.p_memsz) return true;
  }
  return false;
}

struct Module {
  std::uintptr_t base = 0;
  std::uintptr_t relro_begin = 0, relro_end = 0;
  const ElfW(Sym) * symbols = nullptr;
  const char* strings = nullptr;
  const ElfW(Rela) * tables[2] = {nullptr, nullptr};
  std::size_t counts[2] = {0, 0};
  bool is_python = false;
};

Module parse(const dl_phdr_info& info) {
  Module module;
  module.base = info.dlpi_addr;
  const ElfW(Dyn)* dynamic = nullptr;
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = info.dlpi_phdr[i];
    if (header.p_type == PT_DYNAMIC)
      dynamic = reinterpret_cast<const ElfW(Dyn)*>(module.base + header.p_vaddr);
    if (header.p_type == PT_GNU_RELRO) {
      module.relro_begin = module.base + header.p_vaddr;
      module.relro_end = module.relro_begin + header.p_memsz;
    }
  }
  // The loader may or may not have made these absolute.
  const auto pointer = [&](ElfW(Addr) value) {
    return value < module.base ? module.base + value : value;
  };
  for (; dynamic && dynamic->d_tag != DT_NULL; ++dynamic) {
    const auto value = dynamic->d_un.d_val;
    switch (dynamic->d_tag) {
      case DT_SYMTAB:
        module.symbols = reinterpret_cast<const ElfW(Sym)*>(pointer(value));
        break;
      case DT_STRTAB:
        module.strings = reinterpret_cast<const char*>(pointer(value));
        break;
      case DT_JMPREL:
        module.tables[0] = reinterpret_cast<const ElfW(Rela)*>(pointer(value));
        break;
      case DT_PLTRELSZ:
        module.counts[0] = value / sizeof(ElfW(Rela));
        break;
      case DT_RELA:
        module.tables[1] = reinterpret_cast<const ElfW(Rela)*>(pointer(value));
        break;
      case DT_RELASZ:
        module.counts[1] = value / sizeof(ElfW(Rela));
        break;
      default:
        break;
    }
  }
  return module;
}

const Replacement* find(const char* name) {
  for (const Replacement& replacement : kReplacements)
    if (std::strcmp(name, replacement.name) == 0) return &replacement;
  return nullptr;
}

// False for a slot that the loader has yet to relocate: it would add to, or replace, our pointer.
bool patch_slot(const Module& module, void** slot, void* function) {
  if (*slot == function) return true;
  // As the file has it: nothing, or an offset into the library.
  constexpr std::uintptr_t kOffsets = std::uintptr_t{1} << 32;
  if (!*slot || (module.base > kOffsets && reinterpret_cast<std::uintptr_t>(*slot) < kOffsets))
    return false;
  const auto address = reinterpret_cast<std::uintptr_t>(slot);
  const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  auto* page = reinterpret_cast<void*>(address & ~(page_bytes - 1));
  // The loader protects whole pages only.
  const bool read_only =
      address >= module.relro_begin && address < (module.relro_end & ~(page_bytes - 1));
  if (read_only && mprotect(page, page_bytes, PROT_READ | PROT_WRITE) != 0) return true;
  __atomic_store_n(slot, function, __ATOMIC_RELEASE);
  if (read_only) mprotect(page, page_bytes, PROT_READ);
  return true;
}

bool patch(const Module& module) {
  bool complete = true;
  if (!module.symbols || !module.strings) return complete;
  for (int t = 0; t < 2; ++t) {
    for (std::size_t i = 0; module.tables[t] && i < module.counts[t]; ++i) {
      const ElfW(Rela) & entry = module.tables[t][i];
      const unsigned type = ELF64_R_TYPE(entry.r_info);
      if (type != kJumpSlot && type != kGlobalData) continue;
      const char* name = module.strings + module.symbols[ELF64_R_SYM(entry.r_info)].st_name;
      if (const Replacement* found = find(name))
        complete &= patch_slot(module, reinterpret_cast<void**>(module.base + entry.r_offset),
                               module.is_python ? found->in_python : found->function);
    }
  }
  return complete;
}

// Libraries that must keep the plain calls: libc's own and the loader, sanitizer run times.
bool is_excluded(const char* path) {
  const char* slash = std::strrchr(path, '/');
  const char* file = slash ? slash + 1 : path;
  for (const char* prefix : {"libc.so", "libc-", "ld-linux", "ld-", "linux-vdso", "libpthread",
                             "libdl.", "libasan", "libtsan", "libubsan"})
    if (std::strncmp(file, prefix, std::strlen(prefix)) == 0) return true;
  return false;
}

struct Scan {
  unsigned long long seen = 0;   // libraries ever loaded, at the last scan that was complete
  const void* python = nullptr;  // an address in the interpreter
  bool complete = true;
};

// No dladdr in here: it takes the loader's locks in the other order.
int visit(dl_phdr_info* info, std::size_t, void* data) {
  auto* scan = static_cast<Scan*>(data);
  if (is_excluded(info->dlpi_name)) return 0;
  if (holds(*info, reinterpret_cast<const void*>(&install_interposers))) return 0;
  Module module = parse(*info);
  module.is_python = scan->python && holds(*info, scan->python);
  scan->complete &= patch(module);
  return 0;
}

int count_loaded(dl_phdr_info* info, std::size_t, void* data) {
  *static_cast<unsigned long long*>(data) = info->dlpi_adds;
  return 1;
}

}  // namespace

void install_interposers() {
  static std::mutex mutex;
  static Scan scan;
  // Another thread is at it; or was, in the parent of this forked process.
  std::unique_lock guard(mutex, std::try_to_lock);
  if (!guard) return;
  unsigned long long loaded = 0;
  dl_iterate_phdr(count_loaded, &loaded);
  if (loaded == scan.seen) return;
  scan.python = ::dlsym(RTLD_DEFAULT, "Py_IsInitialized");
  scan.complete = true;
  dl_iterate_phdr(visit, &scan);
  if (scan.complete) scan.seen = loaded;
}

}  // namespace umem::soft
