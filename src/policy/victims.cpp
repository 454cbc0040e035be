#include "policy/victims.h"

#include <algorithm>

namespace umem::policy {
namespace {

using residency::CandidateView;
using residency::Family;
using residency::RangeId;
using residency::Tag;
using residency::Unit;

// Appends resident units in recency order, oldest first, that `admit` and that may leave, until
// they hold `need` bytes. Returns the bytes still missing.
template <class Admit>
std::size_t oldest_first(const CandidateView& view, std::size_t need, std::vector<RangeId>& out,
                         Admit admit) {
  const residency::Ledger& ledger = view.ledger;
  for (RangeId id = ledger.oldest_resident(); id != residency::kNoRange && need > 0;
       id = ledger.at(id).newer) {
    if (!view.evictable(id) || !admit(ledger.at(id))) continue;
    out.push_back(id);
    need -= std::min(need, ledger.at(id).bytes);
  }
  return need;
}

// Likewise in passes: each kind only if the kinds before it do not suffice.
template <class... Kinds>
void in_passes(const CandidateView& view, std::size_t need, std::vector<RangeId>& out,
               Kinds... kinds) {
  ((need = need > 0 ? oldest_first(view, need, out, kinds) : 0), ...);
}

bool is_conv(const Unit& unit) {
  return unit.tag == Tag::kActivation &&
         (unit.family == Family::kConv || unit.family == Family::kLinear);
}

}  // namespace

void lru_victims(const CandidateView& view, std::size_t need, std::vector<RangeId>& out) {
  const auto large = [&](const Unit& unit) { return view.worth_moving(unit); };
  const auto small = [&](const Unit& unit) { return !view.worth_moving(unit); };
  in_passes(view, need, out, large, small);
}

void conv_lru_victims(const CandidateView& view, std::size_t need, std::vector<RangeId>& out) {
  const auto conv = [&](const Unit& unit) { return view.worth_moving(unit) && is_conv(unit); };
  const auto other = [&](const Unit& unit) { return view.worth_moving(unit) && !is_conv(unit); };
  const auto small = [&](const Unit& unit) { return !view.worth_moving(unit); };
  in_passes(view, need, out, conv, other, small);
}

}  // namespace umem::policy
