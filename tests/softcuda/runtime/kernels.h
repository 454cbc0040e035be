// Kernels are known by name only. Kernels that fill or copy contiguous memory, or set the condition
// of a graph, run on the host; all others change no memory.
#pragma once
#include <cstddef>
#include <string>

namespace softcudart {

enum class Meaning { kNone, kFill, kCopy, kSetCondition };

struct Kernel {
  std::string name;  // mangled
  Meaning meaning = Meaning::kNone;
  std::size_t element_bytes = 0;
};

// The action of the kernel with this mangled name, as far as it is known.
Kernel interpret(const char* mangled);
// Enqueues the kernel; its arguments are read now, as a launch does.
int launch(const Kernel& kernel, void** args, void* stream);

}  // namespace softcudart
