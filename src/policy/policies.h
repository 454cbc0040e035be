// The makers of the native policies, one file each.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "residency/policy.h"

namespace umem::policy {

std::unique_ptr<residency::Policy> make_none();
std::unique_ptr<residency::Policy> make_lru();
std::unique_ptr<residency::Policy> make_conv_lru();

// Appends resident units in recency order, oldest first, that `admit` and that may leave, until
// they hold `need` bytes. Returns the bytes still missing.
template <class Admit>
std::size_t oldest_first(const residency::CandidateView& view, std::size_t need,
                         std::vector<residency::RangeId>& out, Admit admit) {
  const residency::Ledger& ledger = view.ledger;
  for (auto id = ledger.oldest_resident(); id != residency::kNoRange && need > 0;
       id = ledger.at(id).newer) {
    if (!view.evictable(id) || !admit(ledger.at(id))) continue;
    out.push_back(id);
    need -= std::min(need, ledger.at(id).bytes);
  }
  return need;
}

// The same in passes: units of each kind only where all of those before do not suffice.
template <class... Kinds>
void in_passes(const residency::CandidateView& view, std::size_t need,
               std::vector<residency::RangeId>& out, Kinds... kinds) {
  ((need = need > 0 ? oldest_first(view, need, out, kinds) : 0), ...);
}

}  // namespace umem::policy
