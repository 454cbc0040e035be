// SIGSEGV on a managed page is a page fault of the device. Everything else is passed to the
// previous handler of SIGSEGV, or to one registered since.
#pragma once
#include <signal.h>

namespace umem::soft {

// Around fork(): another thread may be installing it. Before the device's lock.
void lock_fault_handler_for_fork();
void unlock_fault_handler_after_fork();

// Idempotent; remains installed for the life of the process, since managed pages may outlive
// `disable`.
void install_fault_handler();

// The rest of the program's sigaction(SIGSEGV) once ours is installed: it changes and reports the
// handler of faults that are not ours.
int chain_sigaction(const struct sigaction* action, struct sigaction* previous);

}  // namespace umem::soft
