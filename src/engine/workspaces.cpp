#include "engine/workspaces.h"

#include <algorithm>

namespace umem::engine {
namespace {

// Ledger time, which counts uses of units: some hundred ops. A result that is unused for so long
// may be taken for a workspace, and then stays on the device until it is freed.
constexpr std::uint64_t kLong = 1024;

}  // namespace

// With sizes that are not known, any result of a product may be one.
bool Workspaces::may_be(const Ledger& ledger, RangeId id, Family family) const {
  if (!ledger.live(id) || ledger.at(id).segment) return false;
  const auto same = [&](std::size_t bytes) { return bytes == ledger.at(id).requested_bytes; };
  const bool product = family == Family::kLinear || family == Family::kAttention;
  return sizes_.empty() ? product : std::any_of(sizes_.begin(), sizes_.end(), same);
}

void Workspaces::left_behind(const Ledger& ledger, RangeId id, Family family) {
  if (sizes_.empty() || (family != Family::kLinear && family != Family::kAttention)) return;
  if (may_be(ledger, id, family)) candidates_.push_back({id, ledger.at(id).born, ledger.now()});
}

void Workspaces::find(Ledger& ledger, std::vector<RangeId>& away) {
  std::erase_if(candidates_, [&](const Candidate& candidate) {
    const RangeId id = candidate.id;
    if (!ledger.live(id) || ledger.at(id).born != candidate.born) return true;
    if (ledger.at(id).last_use > candidate.made) return true;  // a result
    if (ledger.now() - candidate.made < kLong) return false;
    ledger.exempt(id);
    found_.push_back(id);
    if (ledger.away(id)) away.push_back(id);
    return true;
  });
}

void Workspaces::retired(Ledger& ledger, RangeId id) {
  const auto found = std::find(found_.begin(), found_.end(), id);
  if (found == found_.end()) return;
  ledger.unexempt(id);
  found_.erase(found);
}

}  // namespace umem::engine
