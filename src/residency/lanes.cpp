#include "residency/lanes.h"

namespace umem::residency {

using driver::check;
using driver::Entry;

Status Lanes::open() {
  for (cu::CUstream* stream : {&in_, &out_})
    UMEM_RETURN_IF_ERROR(
        check(table_.cuStreamCreate(stream, cu::CU_STREAM_NON_BLOCKING), Entry::cuStreamCreate));
  for (cu::CUevent* event : {&compute_done_, &out_done_, &in_done_})
    UMEM_RETURN_IF_ERROR(
        check(table_.cuEventCreate(event, cu::CU_EVENT_DISABLE_TIMING), Entry::cuEventCreate));
  return {};
}

Status Lanes::close() {
  Status first;
  const auto keep = [&](Status status) {
    if (first.ok() && !status.ok()) first = std::move(status);
  };
  for (cu::CUstream stream : {in_, out_})
    if (stream) keep(check(table_.cuStreamDestroy(stream), Entry::cuStreamDestroy));
  for (cu::CUevent event : {compute_done_, out_done_, in_done_})
    if (event) keep(check(table_.cuEventDestroy(event), Entry::cuEventDestroy));
  in_ = out_ = nullptr;
  compute_done_ = out_done_ = in_done_ = nullptr;
  return first;
}

Status Lanes::order(cu::CUstream first, cu::CUevent event, cu::CUstream second) {
  UMEM_RETURN_IF_ERROR(check(table_.cuEventRecord(event, first), Entry::cuEventRecord));
  return check(table_.cuStreamWaitEvent(second, event, 0), Entry::cuStreamWaitEvent);
}

Status Lanes::send_out(const std::vector<backing::Span>& spans, cu::CUstream compute) {
  UMEM_RETURN_IF_ERROR(order(compute, compute_done_, out_));
  return mover_.prefetch(spans, backing::Where::kHost, out_);
}

Status Lanes::discard(const std::vector<backing::Span>& spans, cu::CUstream compute) {
  UMEM_RETURN_IF_ERROR(order(compute, compute_done_, out_));
  return mover_.discard(spans, out_);
}

Status Lanes::bring_in(const std::vector<backing::Span>& spans, cu::CUstream compute) {
  UMEM_RETURN_IF_ERROR(order(out_, out_done_, in_));
  UMEM_RETURN_IF_ERROR(mover_.prefetch(spans, backing::Where::kDevice, in_));
  return order(in_, in_done_, compute);
}

Status Lanes::populate(const std::vector<backing::Span>& spans, cu::CUstream compute) {
  UMEM_RETURN_IF_ERROR(order(out_, out_done_, in_));
  // The range may have been freed by work that compute still holds.
  UMEM_RETURN_IF_ERROR(order(compute, compute_done_, in_));
  UMEM_RETURN_IF_ERROR(mover_.discard_and_prefetch(spans, in_));
  return order(in_, in_done_, compute);
}

}  // namespace umem::residency
