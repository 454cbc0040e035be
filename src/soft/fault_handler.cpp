#include "soft/fault_handler.h"

#include <ucontext.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <utility>

#include "soft/faults.h"

namespace umem::soft {
namespace {

struct sigaction g_next;  // the handler of other faults
std::mutex g_chain_mutex;
bool g_installed = false;
bool g_put_back = false;  // over a handler that may have ours as its next one
constinit thread_local bool t_forwarding = false;

// Reports whether the access that faulted was a write; true if that is not known. A page that is
// only read then becomes writable, which costs a transfer later.
bool is_write([[maybe_unused]] const void* context) {
#if defined(__x86_64__)
  constexpr greg_t kWrite = 2;  // of the page fault's error code
  return (static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & kWrite) != 0;
#else
  return true;
#endif
}

void run_default(int signal_number, const siginfo_t* info) {
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  sigaction(signal_number, &action, nullptr);
  // A faulting access repeats on return and ends the process; a signal that was sent does not.
  if (info->si_code <= 0) raise(signal_number);
}

void on_segv(int signal_number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  // Hardware faults only: a SIGSEGV that someone sent has a code <= 0 and no address.
  if (info->si_code > 0 && handle_fault(info->si_addr, is_write(context))) {
    errno = saved_errno;
    return;
  }
  errno = saved_errno;
  if (g_put_back && t_forwarding) return run_default(signal_number, info);
  const struct sigaction next = g_next;
  // The kernel would have done this.
  if ((next.sa_flags & SA_RESETHAND) && next.sa_handler != SIG_IGN) {
    g_next.sa_handler = SIG_DFL;
    g_next.sa_flags = 0;
  }
  t_forwarding = true;
  if (next.sa_flags & SA_SIGINFO) {
    next.sa_sigaction(signal_number, info, context);
  } else if (next.sa_handler == SIG_IGN && info->si_code <= 0) {
    // As the program requested.
  } else if (next.sa_handler == SIG_DFL || next.sa_handler == SIG_IGN) {
    run_default(signal_number, info);
  } else {
    next.sa_handler(signal_number);
  }
  t_forwarding = false;
}

// Between the other handler's installation and now a page fault would have ended the process.
void say_put_back() {
  static constexpr char kLine[] =
      "umem: another SIGSEGV handler took the place of umem's, which serves page faults; it is put "
      "back, and passes on all other faults\n";
  if (std::exchange(g_put_back, true)) return;
  [[maybe_unused]] const ssize_t n = write(STDERR_FILENO, kLine, sizeof kLine - 1);
}

}  // namespace

void lock_fault_handler_for_fork() {
  g_chain_mutex.lock();
}

void unlock_fault_handler_after_fork() {
  g_chain_mutex.unlock();
}

void install_fault_handler() {
  std::lock_guard guard(g_chain_mutex);
  struct sigaction current = {};
  sigaction(SIGSEGV, nullptr, &current);
  const bool ours = (current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_segv;
  if (ours) return;
  if (std::exchange(g_installed, true)) say_put_back();
  g_next = current;
  struct sigaction action = {};
  action.sa_sigaction = on_segv;
  // NODEFER: a handler further down the chain may rely on a second fault ending the process.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART;
  sigfillset(&action.sa_mask);
  for (int fatal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP})
    sigdelset(&action.sa_mask, fatal);
  sigaction(SIGSEGV, &action, nullptr);
}

int chain_sigaction(const struct sigaction* action, struct sigaction* previous) {
  std::lock_guard guard(g_chain_mutex);
  if (previous) *previous = g_next;
  if (action) g_next = *action;
  return 0;
}

}  // namespace umem::soft
