// The two lanes: one side stream a direction, ordered against compute by events.
#pragma once
#include <vector>

#include "backing/mover.h"
#include "base/status.h"
#include "driver/table.h"

namespace umem::residency {

class Lanes {
 public:
  Lanes(const driver::Table& table, int device) : table_(table), mover_(table, device) {}
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  Status open();
  Status close();

  // Device -> host, after all that compute has been given so far.
  Status send_out(const std::vector<backing::Span>& spans, cu::CUstream compute);
  // Drops dead bytes, likewise.
  Status discard(const std::vector<backing::Span>& spans, cu::CUstream compute);
  // Host -> device, after what the out lane holds; compute waits for the arrival.
  Status bring_in(const std::vector<backing::Span>& spans, cu::CUstream compute);
  // Populates without a copy what holds no data.
  Status populate(const std::vector<backing::Span>& spans, cu::CUstream compute);
  // Compute waits for what the out lane holds: a range that was discarded there is used again.
  Status settle(cu::CUstream compute) { return order(out_, out_done_, compute); }
  bool can_discard() const { return mover_.can_discard(); }

 private:
  Status order(cu::CUstream first, cu::CUevent event, cu::CUstream second);

  const driver::Table& table_;
  backing::Mover mover_;
  cu::CUstream in_ = nullptr, out_ = nullptr;
  cu::CUevent compute_done_ = nullptr, out_done_ = nullptr, in_done_ = nullptr;
};

}  // namespace umem::residency
