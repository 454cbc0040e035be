#include "policy/policies.h"

namespace umem::policy {
namespace {

using residency::Unit;

// Least recently used first. Units below the size floor leave only when nothing larger can.
class Lru final : public residency::Policy {
 public:
  const char* name() const override { return "lru"; }
  void victims(const residency::CandidateView& view, std::size_t need,
               std::vector<residency::RangeId>& out) const override {
    const auto large = [&](const Unit& unit) { return view.worth_moving(unit); };
    const auto small = [&](const Unit& unit) { return !view.worth_moving(unit); };
    in_passes(view, need, out, large, small);
  }
};

}  // namespace

std::unique_ptr<residency::Policy> make_lru() {
  return std::make_unique<Lru>();
}

}  // namespace umem::policy
