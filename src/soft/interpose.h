// System calls do not fault: the kernel refuses an evicted page with EFAULT. So the calls by which
// a program hands managed memory to the kernel are wrapped in every loaded library, by replacing
// the library's entry for them in its global offset table: the pages are made accessible on the
// host for the length of the call.
#pragma once

namespace umem::soft {

// Wraps the calls in all libraries loaded now; libraries loaded later are wrapped by dlopen.
// Idempotent; stays for the life of the process.
void install_interposers();

// Host access to [ptr, ptr + bytes), as far as managed pages lie in it. device.cpp.
bool open_host_window(const void* ptr, unsigned long bytes);
void close_host_window(const void* ptr, unsigned long bytes);

}  // namespace umem::soft
