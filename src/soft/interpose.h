// System calls do not fault: the kernel refuses an evicted page with EFAULT. So the calls that pass
// managed memory to the kernel are wrapped in every loaded library, by replacing the library's
// entry for them in its global offset table. The pages are made accessible before the call, and
// their memory is not reused while it runs: under O_DIRECT a disk reads and writes there.
#pragma once
namespace umem::soft {

// Wraps the calls in all libraries loaded now. Those loaded later are wrapped by dlopen; those that
// it searches for by name, by the dlsym after it or at the end of the step. Idempotent; remains for
// the life of the process.
void install_interposers();

}  // namespace umem::soft
