// Copies and fills. They move bytes at the moment their stream reaches them.
//
// Host memory that is not pinned: a copy from it has read it when the call returns; a copy to it
// has written it when the call returns.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "capture.h"
#include "config.h"
#include "entry.h"
#include "soft/rules.h"
#include "softcuda.h"
#include "vmm.h"
#include "work.h"

using namespace softcuda;  // NOLINT

namespace {

enum class Side { kDevice, kPinned, kPageable };

Side side_of(CUdeviceptr ptr) {
  Allocation found;
  if (!find_allocation(ptr, found)) return Side::kPageable;
  return found.kind == Kind::kHost ? Side::kPinned : Side::kDevice;
}

// The memory known to the driver that the call touches.
Accesses touching(CUdeviceptr ptr, std::size_t span, Use use, const char* name) {
  if (side_of(ptr) == Side::kPageable) return {};
  return {{ptr, ptr + span, use, name}};
}

bool inside_allocation(CUdeviceptr ptr, std::size_t span) {
  if (AddressRange reserved; find_reservation(ptr, reserved)) return is_mapped(ptr, span);
  Allocation found;
  if (!find_allocation(ptr, found)) return true;  // the program's own memory: not checked
  return umem::soft::inside(ptr, span, found.base, found.bytes);
}

struct Rectangle {
  CUdeviceptr to, from;
  std::size_t to_pitch, from_pitch, width, height;
};

std::size_t span(std::size_t pitch, std::size_t width, std::size_t height) {
  return height == 0 ? 0 : pitch * (height - 1) + width;
}

void move_rows(const Rectangle& r) {
  for (std::size_t row = 0; row < r.height; ++row)
    std::memmove(reinterpret_cast<void*>(r.to + row * r.to_pitch),
                 reinterpret_cast<const void*>(r.from + row * r.from_pitch), r.width);
}

Work copy_work(Rectangle r, const std::shared_ptr<std::vector<char>>& staged) {
  return [r, staged] {
    move_rows(r);
    return CUDA_SUCCESS;
  };
}

CUresult copy(Rectangle r, CUstream handle, bool wait_for_it, const char* name) {
  RETURN_IF_FAILED(check_context());
  if (r.width == 0 || r.height == 0) return CUDA_SUCCESS;
  if (!r.to || !r.from || (r.height > 1 && (r.to_pitch < r.width || r.from_pitch < r.width)))
    return CUDA_ERROR_INVALID_VALUE;
  if (!inside_allocation(r.to, span(r.to_pitch, r.width, r.height)) ||
      !inside_allocation(r.from, span(r.from_pitch, r.width, r.height)))
    return CUDA_ERROR_INVALID_VALUE;
  auto lock = lock_work();
  const StreamRef stream = find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (wait_for_it) RETURN_IF_FAILED(check_not_capturing(stream));
  Accesses accesses = touching(r.from, span(r.from_pitch, r.width, r.height), Use::kRead, name);
  for (const Access& access :
       touching(r.to, span(r.to_pitch, r.width, r.height), Use::kWrite, name))
    accesses.push_back(access);
  std::shared_ptr<std::vector<char>> staged;
  if (deferred() && !stream->capture && side_of(r.from) == Side::kPageable) {
    staged = std::make_shared<std::vector<char>>(r.width * r.height);
    Rectangle in{reinterpret_cast<CUdeviceptr>(staged->data()),
                 r.from,
                 r.width,
                 r.from_pitch,
                 r.width,
                 r.height};
    move_rows(in);
    r.from = in.to;
    r.from_pitch = r.width;
  }
  RETURN_IF_FAILED(enqueue(stream, {copy_work(r, staged), {}, false, std::move(accesses)}));
  if (wait_for_it || (!stream->capture && side_of(r.to) == Side::kPageable))
    wait_stream(lock, stream);
  return device_state();
}

CUresult copy_line(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream,
                   bool wait_for_it, const char* name) {
  return copy({to, from, bytes, bytes, bytes, 1}, stream, wait_for_it, name);
}

template <class Value>
CUresult fill(CUdeviceptr to, Value value, std::size_t count, CUstream handle, const char* name) {
  RETURN_IF_FAILED(check_context());
  if (count == 0) return CUDA_SUCCESS;
  if (!to || count > ~std::size_t{0} / sizeof(Value) || to % sizeof(Value) != 0 ||
      !inside_allocation(to, count * sizeof(Value)))
    return CUDA_ERROR_INVALID_VALUE;
  const Work work = [to, value, count] {
    std::fill_n(reinterpret_cast<Value*>(to), count, value);
    return CUDA_SUCCESS;
  };
  return enqueue_on(handle, work, touching(to, count * sizeof(Value), Use::kWrite, name));
}

}  // namespace

ENTRY(cuMemcpyAsync, 4000, (CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream)) {
  SOFTCUDA_ENTER();
  return copy_line(to, from, bytes, stream, false, __func__);
}
ENTRY(cuMemcpy, 4000, (CUdeviceptr to, CUdeviceptr from, std::size_t bytes)) {
  SOFTCUDA_ENTER();
  return copy_line(to, from, bytes, nullptr, true, __func__);
}
ENTRY(cuMemcpyHtoDAsync_v2, 3020,
      (CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream)) {
  SOFTCUDA_ENTER();
  return copy_line(to, reinterpret_cast<CUdeviceptr>(from), bytes, stream, false, __func__);
}
ENTRY(cuMemcpyDtoHAsync_v2, 3020,
      (void* to, CUdeviceptr from, std::size_t bytes, CUstream stream)) {
  SOFTCUDA_ENTER();
  return copy_line(reinterpret_cast<CUdeviceptr>(to), from, bytes, stream, false, __func__);
}
ENTRY(cuMemcpyDtoDAsync_v2, 3020,
      (CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream)) {
  SOFTCUDA_ENTER();
  return copy_line(to, from, bytes, stream, false, __func__);
}
ENTRY(cuMemcpyHtoD_v2, 3020, (CUdeviceptr to, const void* from, std::size_t bytes)) {
  SOFTCUDA_ENTER();
  return copy_line(to, reinterpret_cast<CUdeviceptr>(from), bytes, nullptr, true, __func__);
}
ENTRY(cuMemcpyDtoH_v2, 3020, (void* to, CUdeviceptr from, std::size_t bytes)) {
  SOFTCUDA_ENTER();
  return copy_line(reinterpret_cast<CUdeviceptr>(to), from, bytes, nullptr, true, __func__);
}
ENTRY(cuMemsetD8Async, 3020,
      (CUdeviceptr to, unsigned char value, std::size_t count, CUstream stream)) {
  SOFTCUDA_ENTER();
  return fill(to, value, count, stream, __func__);
}
ENTRY(cuMemsetD32Async, 3020,
      (CUdeviceptr to, unsigned value, std::size_t count, CUstream stream)) {
  SOFTCUDA_ENTER();
  return fill(to, value, count, stream, __func__);
}
ENTRY(cuMemsetD8_v2, 3020, (CUdeviceptr to, unsigned char value, std::size_t count)) {
  SOFTCUDA_ENTER();
  return fill(to, value, count, nullptr, __func__);
}

// cuMemcpy2D's parameter record is large; the software libcudart needs no more than this.
int softcuda_copy_2d(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                     std::size_t width, std::size_t height, void* stream) {
  return copy({reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), to_pitch,
               from_pitch, width, height},
              static_cast<CUstream>(stream), false, "cudaMemcpy2DAsync");
}
