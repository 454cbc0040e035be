// SIGSEGV on a managed page is a page fault of the device. Everything else goes on to whoever
// handled SIGSEGV before or asked to since.
#pragma once
#include <signal.h>

namespace umem::soft {

// Idempotent; stays installed for the life of the process, since managed pages may outlive umem's
// being enabled.
void install_fault_handler();
// True if the address was a managed page, which is now accessible. Called on the faulting thread.
bool handle_fault(void* address);  // device.cpp

// What sigaction(SIGSEGV) of the rest of the program means once ours is installed: it changes and
// reports the handler that faults which are not ours go to.
int chain_sigaction(const struct sigaction* action, struct sigaction* previous);

}  // namespace umem::soft
