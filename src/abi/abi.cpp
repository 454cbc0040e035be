#include "abi/abi.h"

#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "base/format.h"
#include "driver/loader.h"
#include "driver/place.h"
#include "driver/table.h"
#include "runtime/accounts.h"
#include "runtime/alloc.h"
#include "runtime/runtime.h"

namespace {

using namespace umem;  // NOLINT: the file is the border, not a part of it

// torch turns it into a RuntimeError with its message.
using Error = std::runtime_error;

void check(const Status& status) {
  if (!status.ok()) throw Error(status.message());
}

// The driver, opened apart from the runtime, because torch calls while umem is off too. Never
// destroyed: torch frees at exit.
struct Opened {
  driver::Driver driver;
  Status status = driver::open_cuda(driver);
};
const Opened& opened() {
  static const auto* made = new Opened;
  return *made;
}

const driver::Table& table() {
  check(opened().status);
  return opened().driver.table;
}

void refuse_capture(void* stream) {
  cu::CUstreamCaptureStatus status = cu::CU_STREAM_CAPTURE_STATUS_NONE;
  const cu::CUresult asked =
      table().cuStreamIsCapturing(static_cast<cu::CUstream>(stream), &status);
  if (asked == cu::CUDA_SUCCESS && status != cu::CU_STREAM_CAPTURE_STATUS_NONE)
    throw Error(
        "a CUDA graph is being captured, and umem cannot give it memory as torch's pluggable "
        "allocator; use UMEM_ALLOCATOR=subclass");
}

// The device's primary context, which is torch's: whoever calls may have none.
driver::Place place_of(int device) {
  static std::mutex mutex;
  static auto* places = new std::map<int, driver::Place>;  // kept, as torch keeps its contexts
  std::lock_guard guard(mutex);
  if (const auto found = places->find(device); found != places->end()) return found->second;
  driver::Place place{device, nullptr, nullptr};
  cu::CUdevice handle = 0;
  check(driver::check(table().cuDeviceGet(&handle, device), driver::Entry::cuDeviceGet));
  check(driver::check(table().cuDevicePrimaryCtxRetain(&place.context, handle),
                      driver::Entry::cuDevicePrimaryCtxRetain));
  return places->emplace(device, place).first->second;
}

void* plain_alloc(std::size_t bytes, int device) {
  const driver::CallScope scope(table(), place_of(device));
  cu::CUdeviceptr ptr = 0;
  check(driver::check(table().cuMemAlloc(&ptr, bytes), driver::Entry::cuMemAlloc));
  return reinterpret_cast<void*>(ptr);
}

}  // namespace

void* umem_alloc(ssize_t bytes, int device, void* stream) {
  if (bytes == 0) return nullptr;
  if (bytes < 0) throw Error("umem cannot allocate " + std::to_string(bytes) + " bytes");
  refuse_capture(stream);
  const auto size = static_cast<std::size_t>(bytes);
  runtime::Failure failure;
  void* ptr = runtime::allocate(size, device, reinterpret_cast<std::uintptr_t>(stream), &failure);
  if (ptr) return ptr;
  if (static_cast<Code>(failure.code) == Code::kOff) return plain_alloc(size, device);
  if (is_out_of_memory(static_cast<Code>(failure.code)))  // libraries look for torch's words
    throw Error("CUDA out of memory. Tried to allocate " + format_bytes(size) + ". " +
                failure.message);
  throw Error(failure.message);
}

void umem_free(void* ptr, ssize_t, int device, void*) {
  if (!ptr || runtime::release(ptr) || runtime::owns(ptr) || !opened().status.ok()) return;
  try {  // made while umem was off; a deleter must not throw
    const driver::CallScope scope(table(), place_of(device));
    check(driver::check(table().cuMemFree(reinterpret_cast<cu::CUdeviceptr>(ptr)),
                        driver::Entry::cuMemFree));
  } catch (const Error& error) {
    std::fprintf(stderr, "umem: warning: memory could not be freed: %s\n", error.what());
  }
}

void umem_record_stream(void* ptr, void* stream) {
  // Plain memory needs none of it: freeing it waits for the device.
  runtime::record_stream(ptr, reinterpret_cast<std::uintptr_t>(stream));
}

void* umem_base_alloc(void* ptr, std::size_t* bytes) {
  void* base = runtime::base_of(ptr, bytes);
  return base ? base : ptr;
}

void umem_release_cached() {
  runtime::release_cached();
}

void umem_set_memory_fraction(double fraction, int device) {
  if (!(fraction > 0 && fraction <= 1))
    throw std::invalid_argument(
        "umem's budget can be a fraction above 0 and up to 1 of the "
        "device's memory, not " +
        std::to_string(fraction));
  std::size_t total_bytes = 0;
  check(driver::check(table().cuDeviceTotalMem(&total_bytes, device),
                      driver::Entry::cuDeviceTotalMem));
  const auto usable = static_cast<double>(runtime::usable_bytes(total_bytes));
  const auto wanted = static_cast<std::size_t>(fraction * usable);
  runtime::Failure failure;
  if (!runtime::set_budget(device, wanted, &failure)) throw std::invalid_argument(failure.message);
}
