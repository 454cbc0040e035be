#include "soft/interpose.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bitset>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

#include "soft/fault_handler.h"
#include "soft/faults.h"
#include "soft/lock.h"

namespace umem::soft {
namespace {

constexpr std::size_t kMaxParts = IOV_MAX;    // the kernel refuses more
constexpr ssize_t kMostOfACall = 0x7ffff000;  // bytes; the kernel leaves the rest to another one

// Checks addresses only: unmanaged memory costs nothing else.
bool any_managed(const iovec* parts, std::size_t count) {
  return parts && std::any_of(parts, parts + std::min(count, kMaxParts),
                              [](const iovec& part) { return g_bounds.contain(part.iov_base); });
}

// A count beyond the kernel's is its to refuse.
bool is_too_long(const iovec* parts, std::size_t count) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < count && count <= kMaxParts; ++i) {
    if (parts[i].iov_len > SSIZE_MAX - bytes) return false;  // this, too
    bytes += parts[i].iov_len;
  }
  return bytes > kLongestWindow && windows_are_limited();
}

// A window on buffers for the duration of a scope; it preserves the call's errno.
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
  const iovec* parts_;
  std::size_t count_;
  std::bitset<kMaxParts> open_;
  bool refused_ = false;
};

constexpr auto kReads = Access::kReads, kWrites = Access::kWrites;

// The same for the buffers of several messages.
class MessagesAccess {
 public:
  MessagesAccess(const mmsghdr* messages, std::size_t count, Access::Mode mode) {
    for (std::size_t i = 0; messages && i < count && !refused_; ++i) {
      const msghdr& message = messages[i].msg_hdr;
      if (!any_managed(message.msg_iov, message.msg_iovlen)) continue;
      Node* node = new (std::nothrow) Node{{message.msg_iov, message.msg_iovlen, mode}, last_};
      refused_ = !node || node->access.refused();
      if (node) last_ = node;
    }
  }
  ~MessagesAccess() {
    const int error = errno;
    while (last_) delete std::exchange(last_, last_->previous);
    errno = error;
  }
  MessagesAccess(const MessagesAccess&) = delete;
  MessagesAccess& operator=(const MessagesAccess&) = delete;

  bool refused() const { return refused_; }

 private:
  struct Node {
    Access access;
    Node* previous;
  };
  Node* last_ = nullptr;
  bool refused_ = false;
};

template <class Access, class Call>
auto call_within(const Access& access, Call call) -> decltype(call()) {
  if (!access.refused()) return call();
  errno = ENOMEM;  // as where the kernel cannot pin the pages
  return -1;
}

// The window opens before the call, not after an EFAULT: a datagram that could not be delivered is
// lost, and pages that a direct read fills must not be reused meanwhile.
template <class Call>
ssize_t with_access(const iovec* parts, std::size_t count, Access::Mode mode, Call call) {
  if (!any_managed(parts, count)) return call();
  return call_within(Access(parts, count, mode), call);
}

// The length of an array; the kernel refuses negative ones.
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

// The buffers from byte `done` of the first one on, up to `most` bytes of them; returns how many
// there are in `found`.
int cut(const iovec* parts, const iovec* end, std::size_t done, std::size_t most, iovec* found) {
  int count = 0;
  for (; parts < end && most > 0; ++parts, done = 0) {
    const std::size_t bytes = std::min(parts->iov_len - done, most);
    found[count++] = part(static_cast<char*>(parts->iov_base) + done, bytes);
    most -= bytes;
  }
  return count;
}

// Not inlined: its array would be on the stack of every call, and threads may have small ones.
template <class GoesOn, class Call>
[[gnu::noinline]] ssize_t make_in_parts(const iovec* parts, const iovec* end, Access::Mode mode,
                                        GoesOn goes_on, Call call) {
  iovec now[kMaxParts];
  std::size_t done = 0;  // of the first one of `parts`
  for (ssize_t all = 0;;) {
    const auto left = static_cast<std::size_t>(kMostOfACall - all);
    const int count = cut(parts, end, done, std::min(left, kLongestWindow), now);
    std::size_t wanted = 0;
    for (int i = 0; i < count; ++i) wanted += now[i].iov_len;
    if (wanted == 0) return all;
    const ssize_t moved =
        with_access(now, size_of(count), mode, [&] { return call(now, count, all); });
    if (moved < 0) return all > 0 ? all : moved;
    all += moved;
    if (static_cast<std::size_t>(moved) < wanted || !goes_on()) return all;
    for (done += wanted; parts < end && done >= parts->iov_len; ++parts) done -= parts->iov_len;
  }
}

// Calls that return how many bytes of the buffers, in their order, they have taken or filled: one
// whose window would be too long is made as several. `goes_on`: whether it would wait for the rest.
// `call`: makes it for some of the buffers, that many bytes after the first one.
template <class GoesOn, class Call>
ssize_t in_parts(const iovec* parts, int count, Access::Mode mode, GoesOn goes_on, Call call) {
  if (any_managed(parts, size_of(count)) && is_too_long(parts, size_of(count)))
    return make_in_parts(parts, parts + count, mode, goes_on, call);
  return with_access(parts, size_of(count), mode, [&] { return call(parts, count, 0); });
}
template <class GoesOn, class Call>
ssize_t in_parts(const iovec& buffer, Access::Mode mode, GoesOn goes_on, Call call) {
  return in_parts(&buffer, 1, mode, goes_on, [&](const iovec* now, int, ssize_t done) {
    return call(now->iov_base, now->iov_len, done);
  });
}
// A read returns what a pipe or socket has; writes wait, but where the file does not block.
auto while_a_file(int fd) {
  return [fd] {
    struct stat found;
    return fstat(fd, &found) == 0 && (S_ISREG(found.st_mode) || S_ISBLK(found.st_mode));
  };
}
constexpr auto kAll = [] { return true; };

ssize_t read_(int fd, void* p, std::size_t n) {
  return in_parts(part(p, n), kWrites, while_a_file(fd),
                  [&](void* to, std::size_t bytes, ssize_t) { return ::read(fd, to, bytes); });
}
ssize_t read_chk(int fd, void* p, std::size_t n, std::size_t) {
  return read_(fd, p, n);
}
ssize_t write_(int fd, const void* p, std::size_t n) {
  return in_parts(part(p, n), kReads, kAll, [&](const void* from, std::size_t bytes, ssize_t) {
    return ::write(fd, from, bytes);
  });
}
ssize_t pread_(int fd, void* p, std::size_t n, off_t at) {
  return in_parts(
      part(p, n), kWrites, while_a_file(fd),
      [&](void* to, std::size_t bytes, ssize_t done) { return ::pread(fd, to, bytes, at + done); });
}
ssize_t pread_chk(int fd, void* p, std::size_t n, off_t at, std::size_t) {
  return pread_(fd, p, n, at);
}
ssize_t pwrite_(int fd, const void* p, std::size_t n, off_t at) {
  return in_parts(part(p, n), kReads, kAll, [&](const void* from, std::size_t bytes, ssize_t done) {
    return ::pwrite(fd, from, bytes, at + done);
  });
}
ssize_t recv_(int fd, void* p, std::size_t n, int flags) {
  return in_parts(
      part(p, n), kWrites, [&] { return (flags & (MSG_WAITALL | MSG_PEEK)) == MSG_WAITALL; },
      [&](void* to, std::size_t bytes, ssize_t) { return ::recv(fd, to, bytes, flags); });
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
  return in_parts(part(p, n), kReads, kAll, [&](const void* from, std::size_t bytes, ssize_t) {
    return ::send(fd, from, bytes, flags);
  });
}
ssize_t sendto_(int fd, const void* p, std::size_t n, int flags, const sockaddr* to,
                socklen_t length) {
  return with_access(part(p, n), kReads, [&] { return ::sendto(fd, p, n, flags, to, length); });
}
ssize_t readv_(int fd, const iovec* parts, int count) {
  return in_parts(parts, count, kWrites, while_a_file(fd),
                  [&](const iovec* now, int n, ssize_t) { return ::readv(fd, now, n); });
}
ssize_t writev_(int fd, const iovec* parts, int count) {
  return in_parts(parts, count, kReads, kAll,
                  [&](const iovec* now, int n, ssize_t) { return ::writev(fd, now, n); });
}
ssize_t preadv_(int fd, const iovec* parts, int count, off_t at) {
  return in_parts(
      parts, count, kWrites, while_a_file(fd),
      [&](const iovec* now, int n, ssize_t done) { return ::preadv(fd, now, n, at + done); });
}
ssize_t pwritev_(int fd, const iovec* parts, int count, off_t at) {
  return in_parts(parts, count, kReads, kAll, [&](const iovec* now, int n, ssize_t done) {
    return ::pwritev(fd, now, n, at + done);
  });
}
// -1: where the file's position is.
off_t moved_by(off_t at, ssize_t done) {
  return at == -1 ? -1 : at + done;
}
ssize_t preadv2_(int fd, const iovec* parts, int count, off_t at, int flags) {
  return in_parts(parts, count, kWrites, while_a_file(fd),
                  [&](const iovec* now, int n, ssize_t done) {
                    return ::preadv2(fd, now, n, moved_by(at, done), flags);
                  });
}
ssize_t pwritev2_(int fd, const iovec* parts, int count, off_t at, int flags) {
  return in_parts(parts, count, kReads, kAll, [&](const iovec* now, int n, ssize_t done) {
    return ::pwritev2(fd, now, n, moved_by(at, done), flags);
  });
}
ssize_t recvmsg_(int fd, msghdr* message, int flags) {
  if (!message) return ::recvmsg(fd, message, flags);
  return with_access(message->msg_iov, message->msg_iovlen, kWrites,
                     [&] { return ::recvmsg(fd, message, flags); });
}
ssize_t sendmsg_(int fd, const msghdr* message, int flags) {
  if (!message) return ::sendmsg(fd, message, flags);
  return with_access(message->msg_iov, message->msg_iovlen, kReads,
                     [&] { return ::sendmsg(fd, message, flags); });
}
int recvmmsg_(int fd, mmsghdr* messages, unsigned count, int flags, timespec* timeout) {
  return call_within(MessagesAccess(messages, count, kWrites),
                     [&] { return ::recvmmsg(fd, messages, count, flags, timeout); });
}
int sendmmsg_(int fd, mmsghdr* messages, unsigned count, int flags) {
  return call_within(MessagesAccess(messages, count, kReads),
                     [&] { return ::sendmmsg(fd, messages, count, flags); });
}
// By the id of the process or of one of its threads, which name the same memory. A child's pages
// have the same addresses as its parent's.
bool is_this_process(pid_t id) {
  const int error = errno;
  const bool same = id == getpid() || (id > 0 && syscall(SYS_tgkill, getpid(), id, 0) == 0);
  errno = error;
  return same;
}
template <class Call>
ssize_t between_processes(pid_t id, const iovec* local, std::size_t local_count,
                          const iovec* remote, std::size_t remote_count, Access::Mode of_local,
                          Call call) {
  return with_access(local, local_count, of_local, [&] {
    if (!any_managed(remote, remote_count) || !is_this_process(id)) return call();
    return with_access(remote, remote_count, of_local == kWrites ? kReads : kWrites, call);
  });
}
ssize_t process_vm_readv_(pid_t id, const iovec* local, unsigned long local_count,
                          const iovec* remote, unsigned long remote_count, unsigned long flags) {
  return between_processes(id, local, local_count, remote, remote_count, kWrites, [&] {
    return ::process_vm_readv(id, local, local_count, remote, remote_count, flags);
  });
}
ssize_t process_vm_writev_(pid_t id, const iovec* local, unsigned long local_count,
                           const iovec* remote, unsigned long remote_count, unsigned long flags) {
  return between_processes(id, local, local_count, remote, remote_count, kReads, [&] {
    return ::process_vm_writev(id, local, local_count, remote, remote_count, flags);
  });
}
// The bytes that a pipe with free space takes without waiting.
ssize_t write_a_page(int fd, const iovec* parts, std::size_t count) {
  const iovec* end = parts + count;
  const iovec* first = std::find_if(parts, end, [](const iovec& part) { return part.iov_len > 0; });
  if (first == end) return 0;
  return write_(fd, first->iov_base, std::min<std::size_t>(first->iov_len, PIPE_BUF));
}
// Like vmsplice, takes what fits, and waits only for a pipe that is full.
ssize_t copy_to_pipe(int fd, const iovec* parts, std::size_t count, unsigned flags) {
  const bool waits = !(flags & SPLICE_F_NONBLOCK) && !(fcntl(fd, F_GETFL) & O_NONBLOCK);
  for (;;) {
    const ssize_t taken = pwritev2_(fd, parts, static_cast<int>(count), -1, RWF_NOWAIT);
    // Named pipes, and before Linux 6.4 all pipes, know no call that does not wait.
    const bool refused = taken < 0 && errno == EOPNOTSUPP;
    if (taken >= 0 || (errno != EAGAIN && !refused)) return taken;
    pollfd room = {fd, POLLOUT, 0};
    const int ready = poll(&room, 1, waits ? -1 : 0);
    if (ready == 0) errno = EAGAIN;
    if (ready <= 0) return -1;
    if (refused) return write_a_page(fd, parts, count);
  }
}
// A pipe would keep the pages after the call, while their memory becomes another's: it gets a copy.
ssize_t vmsplice_(int fd, const iovec* parts, std::size_t count, unsigned flags) {
  const auto splice = [&] { return ::vmsplice(fd, parts, count, flags); };
  if (!any_managed(parts, count) || count > kMaxParts || fcntl(fd, F_GETPIPE_SZ) < 0)
    return splice();
  if ((fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY)
    return with_access(parts, count, kWrites, splice);
  return copy_to_pipe(fd, parts, count, flags);
}
// So that no other thread's bytes come between.
class StreamLock {
 public:
  explicit StreamLock(std::FILE* file) : file_(file) {
    if (file_) flockfile(file_);
  }
  ~StreamLock() {
    if (file_) funlockfile(file_);
  }
  StreamLock(const StreamLock&) = delete;
  StreamLock& operator=(const StreamLock&) = delete;

 private:
  std::FILE* const file_;
};

// If the kernel refuses a window these fail by themselves, and set the file's error. `call` is one
// of them for the file; `locked`: the file, if the function locks it.
template <class Call>
std::size_t on_stream(const void* p, std::size_t size, std::size_t n, std::FILE* locked,
                      Access::Mode mode, Call call) {
  const iovec buffer = part(p, size * n);
  if (!any_managed(&buffer, 1) || !is_too_long(&buffer, 1)) {
    const Access access(&buffer, 1, mode);
    return call(buffer.iov_base, size, n);
  }
  const StreamLock lock(locked);
  std::size_t done = 0;
  while (done < buffer.iov_len) {
    const iovec now = part(static_cast<char*>(buffer.iov_base) + done,
                           std::min(buffer.iov_len - done, kLongestWindow));
    const Access access(&now, 1, mode);
    const std::size_t moved = call(now.iov_base, 1, now.iov_len);
    done += moved;
    if (moved < now.iov_len) break;
  }
  return done / size;
}
std::size_t fread_(void* p, std::size_t size, std::size_t n, std::FILE* file) {
  return on_stream(p, size, n, file, kWrites, [&](void* to, std::size_t each, std::size_t count) {
    return std::fread(to, each, count, file);
  });
}
std::size_t fread_chk(void* p, std::size_t, std::size_t size, std::size_t n, std::FILE* file) {
  return fread_(p, size, n, file);
}
std::size_t fwrite_(const void* p, std::size_t size, std::size_t n, std::FILE* file) {
  return on_stream(p, size, n, file, kReads,
                   [&](const void* from, std::size_t each, std::size_t count) {
                     return std::fwrite(from, each, count, file);
                   });
}
std::size_t fread_unlocked_(void* p, std::size_t size, std::size_t n, std::FILE* file) {
  return on_stream(p, size, n, nullptr, kWrites,
                   [&](void* to, std::size_t each, std::size_t count) {
                     return ::fread_unlocked(to, each, count, file);
                   });
}
std::size_t fread_unlocked_chk(void* p, std::size_t, std::size_t size, std::size_t n,
                               std::FILE* file) {
  return fread_unlocked_(p, size, n, file);
}
std::size_t fwrite_unlocked_(const void* p, std::size_t size, std::size_t n, std::FILE* file) {
  return on_stream(p, size, n, nullptr, kReads,
                   [&](const void* from, std::size_t each, std::size_t count) {
                     return ::fwrite_unlocked(from, each, count, file);
                   });
}
int sigaction_(int number, const struct sigaction* action, struct sigaction* previous) {
  if (number == SIGSEGV) return chain_sigaction(action, previous);
  if (!action) return ::sigaction(number, action, previous);
  struct sigaction open = *action;
  sigdelset(&open.sa_mask, SIGSEGV);
  return ::sigaction(number, &open, previous);
}
sighandler_t chain_signal(sighandler_t handler, int flags) {
  struct sigaction action = {}, previous = {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  chain_sigaction(&action, &previous);
  return previous.sa_handler;
}
sighandler_t signal_(int number, sighandler_t handler) {
  return number == SIGSEGV ? chain_signal(handler, 0) : ::signal(number, handler);
}
// A library that was compiled for ISO C alone calls it for `signal`.
sighandler_t sysv_signal_(int number, sighandler_t handler) {
  if (number != SIGSEGV) return ::sysv_signal(number, handler);
  return chain_signal(handler, static_cast<int>(SA_RESETHAND));
}
// A thread that blocks SIGSEGV, also inside a handler, would be killed at its first page fault.
int pthread_sigmask_(int how, const sigset_t* set, sigset_t* previous) {
  if (!set || how == SIG_UNBLOCK) return ::pthread_sigmask(how, set, previous);
  sigset_t others = *set;
  sigdelset(&others, SIGSEGV);
  return ::pthread_sigmask(how, &others, previous);
}
int sigprocmask_(int how, const sigset_t* set, sigset_t* previous) {
  const int error = pthread_sigmask_(how, set, previous);
  if (error != 0) errno = error;
  return error == 0 ? 0 : -1;
}
struct Replacement {
  const char* name;
  void* function;
};
const Replacement* find(const char* name);

std::atomic<bool> g_wraps_later{false};  // by the next `dlsym`

// The calls of a library are wrapped before the program has its handle. The search for a name
// without a slash, or with $ORIGIN, depends on the caller, so that one must be a tail call, and the
// next `dlsym` wraps.
void* dlopen_(const char* name, int flags) {
  if (name && (!std::strchr(name, '/') || std::strchr(name, '$'))) {
    g_wraps_later = true;
    return ::dlopen(name, flags);
  }
  void* handle = ::dlopen(name, flags);
  if (handle) install_interposers();
  return handle;
}
// Functions that a program looks up by name are wrapped too (ctypes, cffi). Handles for a place in
// the search order are left to dlsym: it depends on its caller, so this must be a tail call.
void* dlsym_(void* handle, const char* name) {
  if (g_wraps_later && g_wraps_later.exchange(false)) install_interposers();
  if (handle == RTLD_NEXT || handle == RTLD_DEFAULT) return ::dlsym(handle, name);
  void* found = ::dlsym(handle, name);
  const Replacement* replacement = found ? find(name) : nullptr;
  return replacement && found == ::dlsym(RTLD_DEFAULT, name) ? replacement->function : found;
}

template <class F>
Replacement replace(const char* name, F* function) {
  return {name, reinterpret_cast<void*>(function)};
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
    replace("recvmmsg", recvmmsg_),
    replace("sendmmsg", sendmmsg_),
    replace("process_vm_readv", process_vm_readv_),
    replace("process_vm_writev", process_vm_writev_),
    replace("vmsplice", vmsplice_),
    replace("fread", fread_),
    replace("__fread_chk", fread_chk),
    replace("fwrite", fwrite_),
    replace("fread_unlocked", fread_unlocked_),
    replace("__fread_unlocked_chk", fread_unlocked_chk),
    replace("fwrite_unlocked", fwrite_unlocked_),
    replace("sigaction", sigaction_),
    replace("signal", signal_),
    replace("bsd_signal", signal_),
    replace("ssignal", signal_),
    replace("sysv_signal", sysv_signal_),
    replace("__sysv_signal", sysv_signal_),
    replace("pthread_sigmask", pthread_sigmask_),
    replace("sigprocmask", sigprocmask_),
    replace("dlopen", dlopen_),
    replace("dlsym", dlsym_),
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

// False for a slot that the loader has not relocated yet: it would add to, or replace, our pointer.
bool patch_slot(const Module& module, void** slot, void* function) {
  if (*slot == function) return true;
  // As in the file: nothing, or an offset into the library.
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
                               found->function);
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
  unsigned long long seen = 0;  // libraries ever loaded, at the last scan that was complete
  bool complete = true;
};

// No dladdr in here: it takes the loader's locks in the other order.
int visit(dl_phdr_info* info, std::size_t, void* data) {
  auto* scan = static_cast<Scan*>(data);
  if (is_excluded(info->dlpi_name)) return 0;
  if (holds(*info, reinterpret_cast<const void*>(&install_interposers))) return 0;
  scan->complete &= patch(parse(*info));
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
  // Another thread is at it and may have passed the library; or was, in the parent of this forked
  // process.
  std::unique_lock guard(mutex, std::try_to_lock);
  if (!guard) {
    g_wraps_later = true;
    return;
  }
  unsigned long long loaded = 0;
  dl_iterate_phdr(count_loaded, &loaded);
  if (loaded == scan.seen) return;
  scan.complete = true;
  dl_iterate_phdr(visit, &scan);
  if (scan.complete) scan.seen = loaded;
}

}  // namespace umem::soft
