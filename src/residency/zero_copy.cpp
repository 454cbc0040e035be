#include "residency/zero_copy.h"

#include <utility>

namespace umem::residency {

using driver::CallScope;

bool ZeroCopy::use(RangeId id) {
  // Of read-mostly pages both sides have copies: one that is driven out costs no transfer, and the
  // driver would not heed this advice.
  if (!state_.asynchronous() || refused_ || state_.ledger.at(id).read_mostly) return false;
  const managed::MemSpan span = state_.span(id);
  const auto found = advised_.find(id);
  if (found == advised_.end() || found->second.span.bytes < span.bytes) {
    const Status advised = managed::advise_zero_copy(state_.table, span, state_.place.device);
    state_.count_error(advised);
    refused_ = !advised.ok();
    if (refused_) return false;
  }
  advised_.insert_or_assign(id, Advised{span, true});
  state_.counters.zero_copy_bytes += span.bytes;
  return true;
}

void ZeroCopy::step_ended() {
  if (advised_.empty()) return;
  const CallScope scope(state_.table, state_.place);
  for (auto at = advised_.begin(); at != advised_.end();) {
    if (std::exchange(at->second.used, false)) {
      ++at;
      continue;
    }
    end(at->second.span);
    at = advised_.erase(at);
  }
}

void ZeroCopy::clear() {
  const CallScope scope(state_.table, state_.place);
  for (const auto& [id, advised] : advised_) end(advised.span);
  advised_.clear();
}

void ZeroCopy::end(managed::MemSpan span) {
  state_.count_error(managed::end_zero_copy(state_.table, span, state_.place.device));
}

}  // namespace umem::residency
