#include "engine/zero_copy.h"

#include <utility>
#include <vector>

namespace umem::engine {

using driver::CallScope;

bool ZeroCopy::use(RangeId id) {
  // Read-mostly pages have copies on both sides: their eviction costs no transfer, and the driver
  // would ignore this advice.
  if (!state_.asynchronous() || refused_ || state_.ledger.at(id).read_mostly) return false;
  const managed::MemSpan span = state_.span(id);
  Advised& advised = advised_[id];
  if (advised.span.bytes < span.bytes) {  // otherwise it is a smaller block of the same range
    const Status status = state_.mapped()
                              ? Status()  // usable on the host without advice
                              : managed::advise_zero_copy(state_.table, span, state_.place.device);
    advised.span = span;
    if (!status.ok()) {
      state_.count_error(status);
      refused_ = status.code() == Code::kNotSupported;
      end(id);  // one of the two parts of the advice may have been given
      return false;
    }
  }
  advised.used = true;
  state_.counters.zero_copy_bytes += span.bytes;
  return true;
}

void ZeroCopy::step_ended() {
  if (advised_.empty()) return;
  const CallScope scope(state_.table, state_.place);
  std::vector<RangeId> ended;
  for (auto& [id, advised] : advised_)
    if (!std::exchange(advised.used, false)) ended.push_back(id);
  for (RangeId id : ended) end(id);
}

void ZeroCopy::clear() {
  for (auto& [id, advised] : advised_) advised.used = false;
  step_ended();
}

// Refused advice is tried again at the end of the next step.
void ZeroCopy::end(RangeId id) {
  const auto found = advised_.find(id);
  if (found == advised_.end()) return;
  const CallScope scope(state_.table, state_.place);
  const Status status = state_.mapped() ? Status()
                                        : managed::end_zero_copy(state_.table, found->second.span,
                                                                 state_.place.device);
  state_.count_error(status);
  if (status.ok()) advised_.erase(found);
}

}  // namespace umem::engine
