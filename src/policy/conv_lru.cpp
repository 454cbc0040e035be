#include "policy/policies.h"

namespace umem::policy {
namespace {

using residency::Family;
using residency::Tag;
using residency::Unit;

// SuperNeurons (PPoPP'18): move only when memory is short, and then the least recently used
// output of a convolution-like layer. Where those do not suffice any other unit above the size
// floor goes, least recently used first, rather than fail.
class ConvLru final : public residency::Policy {
 public:
  const char* name() const override { return "conv_lru"; }
  void victims(const residency::CandidateView& view, std::size_t need,
               std::vector<residency::RangeId>& out) const override {
    const auto conv = [&](const Unit& unit) { return view.worth_moving(unit) && is_conv(unit); };
    const auto other = [&](const Unit& unit) { return view.worth_moving(unit) && !is_conv(unit); };
    const auto small = [&](const Unit& unit) { return !view.worth_moving(unit); };
    in_passes(view, need, out, conv, other, small);
  }

 private:
  static bool is_conv(const Unit& unit) {
    return unit.tag == Tag::kActivation &&
           (unit.family == Family::kConv || unit.family == Family::kLinear);
  }
};

}  // namespace

std::unique_ptr<residency::Policy> make_conv_lru() {
  return std::make_unique<ConvLru>();
}

}  // namespace umem::policy
