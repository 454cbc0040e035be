#include "engine/lane_meter.h"

#include "base/units.h"

namespace umem::engine {

using cu::CUDA_SUCCESS;
using driver::check;
using driver::Entry;

namespace {

// The first transfers take longer: host memory is made for them.
constexpr std::size_t kLast = 512 * MiB;

}  // namespace

Status LaneMeter::close() {
  under_way_ = 0;
  FirstError error;
  for (cu::CUevent* event : {&begin_, &end_}) {
    if (*event) error.keep(check(table_.cuEventDestroy(*event), Entry::cuEventDestroy));
    *event = nullptr;
  }
  return error.take();
}

// Adds the transfer that was timed last, once it has ended. One that the driver cannot time is left
// out.
void LaneMeter::collect() {
  if (under_way_ == 0) return;
  const cu::CUresult reached = table_.cuEventQuery(end_);
  if (reached == cu::CUDA_ERROR_NOT_READY) return;
  float ms = 0;
  if (reached == CUDA_SUCCESS && table_.cuEventElapsedTime(&ms, begin_, end_) == CUDA_SUCCESS &&
      ms > 0) {
    if (bytes_ >= kLast) {
      bytes_ = bytes_ / 2;
      ns_ = ns_ / 2;
    }
    bytes_ += under_way_;
    ns_ += static_cast<std::uint64_t>(static_cast<double>(ms) * 1e6);
  }
  under_way_ = 0;
}

bool LaneMeter::begin(cu::CUstream stream) {
  collect();
  if (under_way_ > 0) return false;
  for (cu::CUevent* event : {&begin_, &end_})
    if (!*event && table_.cuEventCreate(event, cu::CU_EVENT_DEFAULT) != CUDA_SUCCESS) return false;
  return table_.cuEventRecord(begin_, stream) == CUDA_SUCCESS;
}

LaneMeter::Transfer::Transfer(LaneMeter& meter, std::size_t bytes, cu::CUstream stream)
    : meter_(meter), bytes_(bytes), stream_(stream) {
  if (meter_.place_.context && bytes_ >= kPageBytes) begun_ = meter_.begin(stream_);
}

LaneMeter::Transfer::~Transfer() {
  if (begun_ && meter_.table_.cuEventRecord(meter_.end_, stream_) == CUDA_SUCCESS)
    meter_.under_way_ = bytes_;
}

}  // namespace umem::engine
