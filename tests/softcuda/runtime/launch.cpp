// The functions that the compiler's host code calls: registration of kernels and variables, and
// launches.
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "common.h"
#include "kernels.h"

using softcudart::address;
using softcudart::finish;
using softcudart::Kernel;

namespace {

struct Variable {
  std::size_t bytes = 0;
  std::map<int, std::uint64_t> copies;  // device -> its memory, allocated at first use
};

struct Registry {
  std::mutex mutex;
  std::unordered_map<const void*, Kernel> kernels;  // nodes are kept: handles point to them
  std::unordered_map<const void*, Variable> variables;
};
Registry& registry() {
  static auto* instance = new Registry;  // libraries register before and leave after everything
  return *instance;
}

struct Configuration {
  dim3 grid, block;
  std::size_t shared = 0;
  void* stream = nullptr;
};
thread_local std::vector<Configuration> t_configurations;

const Kernel* find_kernel(const void* function) {
  const std::lock_guard guard(registry().mutex);
  const auto found = registry().kernels.find(function);
  return found == registry().kernels.end() ? nullptr : &found->second;
}

bool valid(dim3 grid, dim3 block) {
  const auto threads = static_cast<unsigned long long>(block.x) * block.y * block.z;
  return grid.x && grid.y && grid.z && threads >= 1 && threads <= 1024;
}

cudaError_t launch_function(const void* function, dim3 grid, dim3 block, void** args,
                            cudaStream_t stream) {
  const Kernel* kernel = find_kernel(function);
  if (!kernel) return finish(cudaErrorInvalidDeviceFunction);
  if (!valid(grid, block)) return finish(cudaErrorInvalidConfiguration);
  return finish(softcudart::launch(*kernel, args, stream));
}

int variable_address(const void* symbol, std::uint64_t& at, std::size_t& bytes) {
  const std::lock_guard guard(registry().mutex);
  const auto found = registry().variables.find(symbol);
  if (found == registry().variables.end()) return cudaErrorInvalidSymbol;
  int device = 0;
  if (const int error = cuCtxGetDevice(&device)) return error;
  std::uint64_t& slot = found->second.copies[device];
  bytes = found->second.bytes;
  if (slot == 0)
    if (const int error = cuMemAlloc_v2(&slot, bytes)) return error;
  at = slot;
  return 0;
}

}  // namespace

#define RUNTIME_C extern "C" __attribute__((visibility("default")))

RUNTIME_C void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
RUNTIME_C void __cudaRegisterFatBinaryEnd(void**) {}
RUNTIME_C void __cudaUnregisterFatBinary(void**) {}
RUNTIME_C char __cudaInitModule(void**) {
  return 0;
}
RUNTIME_C void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int,
                                      uint3*, uint3*, dim3*, dim3*, int*) {
  const std::lock_guard guard(registry().mutex);
  registry().kernels.emplace(host, softcudart::interpret(name));
}
RUNTIME_C void __cudaRegisterVar(void**, char* host, char*, const char*, int, std::size_t bytes,
                                 int, int) {
  const std::lock_guard guard(registry().mutex);
  registry().variables[host].bytes = bytes;
}
RUNTIME_C unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared,
                                               CUstream_st* stream) {
  t_configurations.push_back({grid, block, shared, stream});
  return 0;
}
RUNTIME_API __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  if (t_configurations.empty()) return finish(cudaErrorMissingConfiguration);
  const Configuration top = t_configurations.back();
  t_configurations.pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared = top.shared;
  *static_cast<void**>(stream) = top.stream;
  return cudaSuccess;
}
// A kernel's handle is the address of its host function.
RUNTIME_API __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  if (!find_kernel(function)) return finish(cudaErrorInvalidDeviceFunction);
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
// Counted as cudaLaunchKernel: which of the two is called depends on the compiler only.
RUNTIME_API cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** args, std::size_t,
                             cudaStream_t stream) {
  RUNTIME_ENTER();
  return launch_function(function, grid, block, args, stream);
}
RUNTIME_API __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                               std::size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}
RUNTIME_API cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** args) {
  RUNTIME_ENTER();
  if (!config) return finish(cudaErrorInvalidValue);
  return launch_function(function, config->gridDim, config->blockDim, args, config->stream);
}
RUNTIME_API cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** args,
                                        std::size_t, cudaStream_t stream) {
  RUNTIME_ENTER();
  return launch_function(function, grid, block, args, stream);
}

RUNTIME_API cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  RUNTIME_ENTER();
  if (!attributes) return finish(cudaErrorInvalidValue);
  if (!find_kernel(function)) return finish(cudaErrorInvalidDeviceFunction);
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 80;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return finish(0);
}
RUNTIME_API cudaFuncSetAttribute(const void* function, cudaFuncAttribute, int) {
  RUNTIME_ENTER();
  return finish(find_kernel(function) ? 0 : cudaErrorInvalidDeviceFunction);
}
RUNTIME_API cudaKernelSetAttributeForDevice(cudaKernel_t kernel, cudaFuncAttribute, int,
                                            int device) {
  RUNTIME_ENTER();
  if (device < 0 || device >= softcuda_device_count()) return finish(cudaErrorInvalidDevice);
  return finish(find_kernel(kernel) ? 0 : cudaErrorInvalidDeviceFunction);
}
RUNTIME_API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                   const void* function,
                                                                   int block_size, std::size_t,
                                                                   unsigned) {
  RUNTIME_ENTER();
  if (!blocks || block_size <= 0) return finish(cudaErrorInvalidValue);
  if (!find_kernel(function)) return finish(cudaErrorInvalidDeviceFunction);
  *blocks = 2048 / block_size;
  return finish(0);
}
RUNTIME_API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function,
                                                          int block_size, std::size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size,
                                                                shared, 0);
}

RUNTIME_API cudaGetSymbolAddress(void** ptr, const void* symbol) {
  RUNTIME_ENTER();
  std::uint64_t at = 0;
  std::size_t bytes = 0;
  const int error = variable_address(symbol, at, bytes);
  if (!error) *ptr = reinterpret_cast<void*>(at);
  return finish(error);
}
RUNTIME_API cudaMemcpyToSymbol(const void* symbol, const void* from, std::size_t count,
                               std::size_t offset, cudaMemcpyKind) {
  RUNTIME_ENTER();
  std::uint64_t at = 0;
  std::size_t bytes = 0;
  if (const int error = variable_address(symbol, at, bytes)) return finish(error);
  if (offset > bytes || count > bytes - offset) return finish(cudaErrorInvalidValue);
  return finish(cuMemcpy(at + offset, address(from), count));
}

// Code from files or memory is not run: there are no modules.
RUNTIME_API cudaLibraryLoadData(cudaLibrary_t*, const void*, cudaJitOption*, void**, unsigned,
                                cudaLibraryOption*, void**, unsigned) {
  RUNTIME_ENTER();
  return finish(cudaErrorNotSupported);
}
RUNTIME_API cudaLibraryLoadFromFile(cudaLibrary_t*, const char*, cudaJitOption*, void**, unsigned,
                                    cudaLibraryOption*, void**, unsigned) {
  RUNTIME_ENTER();
  return finish(cudaErrorNotSupported);
}
RUNTIME_API cudaLibraryUnload(cudaLibrary_t) {
  RUNTIME_ENTER();
  return finish(cudaErrorNotSupported);
}
RUNTIME_API cudaLibraryGetKernel(cudaKernel_t*, cudaLibrary_t, const char*) {
  RUNTIME_ENTER();
  return finish(cudaErrorNotSupported);
}
RUNTIME_API cudaLibraryGetKernelCount(unsigned*, cudaLibrary_t) {
  RUNTIME_ENTER();
  return finish(cudaErrorNotSupported);
}
RUNTIME_API cudaLibraryGetGlobal(void**, std::size_t*, cudaLibrary_t, const char*) {
  RUNTIME_ENTER();
  return finish(cudaErrorNotSupported);
}
RUNTIME_API cudaLibraryGetManaged(void**, std::size_t*, cudaLibrary_t, const char*) {
  RUNTIME_ENTER();
  return finish(cudaErrorNotSupported);
}
RUNTIME_API cudaLibraryGetUnifiedFunction(void**, cudaLibrary_t, const char*) {
  RUNTIME_ENTER();
  return finish(cudaErrorNotSupported);
}
