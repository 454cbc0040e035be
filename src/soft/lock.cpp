#include "soft/lock.h"

namespace umem::soft {

Bounds g_bounds;
std::atomic<bool> g_unbacked{false};
std::atomic<std::uintptr_t> g_owner{0};

std::mutex& device_mutex() {
  static auto* mutex = new std::mutex;  // never destroyed: faults may occur during exit
  return *mutex;
}

sigset_t block_signals() {
  sigset_t all, previous;
  sigfillset(&all);
  for (int fatal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&all, fatal);
  pthread_sigmask(SIG_BLOCK, &all, &previous);
  return previous;
}

}  // namespace umem::soft
