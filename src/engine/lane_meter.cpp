#include "engine/lane_meter.h"

#include <utility>

#include "base/units.h"

namespace umem::engine {

using cu::CUDA_SUCCESS;
using driver::check;
using driver::Entry;

namespace {

// Transfers that give a rate together.
constexpr std::size_t kBytes = 64 * MiB, kCount = 8;
// The first ones take longer: host memory is made for them.
constexpr std::size_t kFirst = 2;  // the first of these rates is not used
constexpr std::size_t kTimed = 8;  // after that one transfer in so many is timed

}  // namespace

Status LaneMeter::close() {
  under_way_ = false;
  FirstError error;
  for (cu::CUevent* event : {&begin_, &end_})
    if (*event)
      error.keep(
          check(table_.cuEventDestroy(std::exchange(*event, nullptr)), Entry::cuEventDestroy));
  return error.take();
}

// Adds the transfer that was timed last, once it has ended. One that the driver cannot time is left
// out.
void LaneMeter::collect() {
  if (!under_way_) return;
  const cu::CUresult reached = table_.cuEventQuery(end_);
  if (reached == cu::CUDA_ERROR_NOT_READY) return;
  under_way_ = false;
  float ms = 0;
  if (reached != CUDA_SUCCESS || table_.cuEventElapsedTime(&ms, begin_, end_) != CUDA_SUCCESS)
    return;
  sum_bytes_ += bytes_;
  sum_us_ += static_cast<double>(ms) * 1e3;
  if (++count_ < kCount || sum_bytes_ < kBytes) return;
  if (++windows_ >= kFirst && sum_us_ >= 1) {
    const std::lock_guard guard(mutex_);
    last_ = {sum_bytes_, static_cast<std::uint64_t>(sum_us_)};
  }
  count_ = sum_bytes_ = 0;
  sum_us_ = 0;
}

bool LaneMeter::begin(std::size_t bytes, cu::CUstream stream) {
  if (!place_.context || bytes < kPageBytes) return false;
  if (windows_ >= kFirst && ++transfers_ % kTimed != 0) return false;
  collect();
  if (under_way_) return false;
  for (cu::CUevent* event : {&begin_, &end_})
    if (!*event && table_.cuEventCreate(event, cu::CU_EVENT_DEFAULT) != CUDA_SUCCESS) return false;
  bytes_ = bytes;
  return table_.cuEventRecord(begin_, stream) == CUDA_SUCCESS;
}

void LaneMeter::end(cu::CUstream stream) {
  under_way_ = table_.cuEventRecord(end_, stream) == CUDA_SUCCESS;
}

}  // namespace umem::engine
