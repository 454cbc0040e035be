#include "kernels.h"

#include <cxxabi.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>

#include "softcuda.h"

namespace softcudart {
namespace {

// Sizes of torch's element types by the name in a demangled template argument.
constexpr std::array<std::pair<std::string_view, std::size_t>, 22> kElementTypes{{
    {"bool", 1},
    {"char", 1},
    {"signed char", 1},
    {"unsigned char", 1},
    {"short", 2},
    {"unsigned short", 2},
    {"int", 4},
    {"unsigned int", 4},
    {"long", 8},
    {"unsigned long", 8},
    {"long long", 8},
    {"float", 4},
    {"double", 8},
    {"c10::Half", 2},
    {"c10::BFloat16", 2},
    {"c10::Float8_e4m3fn", 1},
    {"c10::Float8_e5m2", 1},
    {"c10::Float8_e4m3fnuz", 1},
    {"c10::Float8_e5m2fnuz", 1},
    {"c10::complex<c10::Half>", 4},
    {"c10::complex<float>", 8},
    {"c10::complex<double>", 16},
}};

std::size_t size_of_type(std::string_view name) {
  while (name.ends_with(' ')) name.remove_suffix(1);  // "Functor<complex<float> >"
  for (const auto& [type, bytes] : kElementTypes)
    if (name == type) return bytes;
  return 0;
}

std::string demangle(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), &std::free);
  return status == 0 && text ? text.get() : mangled;
}

// The text after `start` up to the closing bracket that belongs to it.
std::string_view enclosed(std::string_view text, std::string_view start, char open, char close) {
  const std::size_t at = text.find(start);
  if (at == std::string_view::npos) return {};
  text.remove_prefix(at + start.size());
  int depth = 1;
  for (std::size_t i = 0; i < text.size(); ++i) {
    depth += text[i] == open ? 1 : text[i] == close ? -1 : 0;
    if (depth == 0) return text.substr(0, i);
  }
  return {};
}

struct Arguments {
  std::size_t count = 0;
  char* to = nullptr;
  const char* from = nullptr;
  std::array<unsigned char, 16> value{};
  std::uint64_t condition = 0;
  Kernel kernel;
};

void run(void* data) {
  const auto& a = *static_cast<Arguments*>(data);
  const std::size_t bytes = a.kernel.element_bytes;
  if (a.kernel.meaning == Meaning::kCopy) {
    std::memmove(a.to, a.from, a.count * bytes);
  } else if (a.kernel.meaning == Meaning::kFill) {
    for (std::size_t i = 0; i < a.count; ++i) std::memcpy(a.to + i * bytes, a.value.data(), bytes);
  } else if (a.kernel.meaning == Meaning::kSetCondition) {
    softcuda_set_condition(a.condition, *a.from != 0 ? 1 : 0);
  }
}
void drop(void* data) {
  delete static_cast<Arguments*>(data);
}

}  // namespace

// vectorized_elementwise_kernel(int count, Functor, std::array<char*, operands>): contiguous
// operands of one element type, the output first. FillFunctor<T> contains only the value.
// set_conditional_handle_kernel(handle, const bool*).
Kernel interpret(const char* mangled) {
  Kernel kernel{mangled, Meaning::kNone, 0};
  if (std::strstr(mangled, "set_conditional_handle_kernel"))
    kernel.meaning = Meaning::kSetCondition;
  if (!std::strstr(mangled, "vectorized_elementwise_kernel")) return kernel;
  const std::string name = demangle(mangled);
  const bool one = name.find("std::array<char*, 1ul>") != std::string::npos;
  const bool two = name.find("std::array<char*, 2ul>") != std::string::npos;
  if (one) {
    kernel.element_bytes = size_of_type(enclosed(name, "at::native::FillFunctor<", '<', '>'));
    if (kernel.element_bytes != 0) kernel.meaning = Meaning::kFill;
  } else if (two && name.find("direct_copy_kernel_cuda(") != std::string::npos) {
    // The innermost lambda takes and returns one element.
    const std::size_t last = name.rfind("{lambda(", name.find(", std::array<char*, 2ul>"));
    if (last == std::string::npos) return kernel;
    kernel.element_bytes =
        size_of_type(enclosed(std::string_view(name).substr(last), "{lambda(", '(', ')'));
    if (kernel.element_bytes != 0) kernel.meaning = Meaning::kCopy;
  }
  return kernel;
}

int launch(const Kernel& kernel, void** args, void* stream) {
  auto arguments = std::make_unique<Arguments>();
  std::array<SoftcudaRange, 2> ranges{};
  std::size_t known = 0;
  const char* name = "an unknown kernel";
  arguments->kernel = kernel;
  if (kernel.meaning == Meaning::kSetCondition) {
    arguments->condition = *static_cast<std::uint64_t*>(args[0]);
    arguments->from = *static_cast<const char**>(args[1]);
  } else if (kernel.meaning != Meaning::kNone) {
    arguments->count = static_cast<std::size_t>(*static_cast<int*>(args[0]));
    char* const* operands = static_cast<char**>(args[2]);
    arguments->to = operands[0];
    const std::size_t bytes = arguments->count * kernel.element_bytes;
    ranges[known++] = {arguments->to, bytes, 1};
    if (kernel.meaning == Meaning::kFill) {
      name = "a fill kernel";
      std::memcpy(arguments->value.data(), args[1], kernel.element_bytes);
    } else {
      name = "a copy kernel";
      arguments->from = operands[1];
      ranges[known++] = {arguments->from, bytes, 0};
    }
  } else {
    softcuda_log(("kernel computes nothing: " + demangle(kernel.name.c_str())).c_str());
  }
  const SoftcudaKernel described{name, ranges.data(), known};
  return softcuda_enqueue(stream, &described, run, drop, arguments.release(), 0);
}

}  // namespace softcudart
