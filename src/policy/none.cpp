#include "policy/policies.h"

namespace umem::policy {
namespace {

// The driver's faults do it all: plain unified memory, the baseline.
class None final : public residency::Policy {
 public:
  const char* name() const override { return "none"; }
  bool active() const override { return false; }
  void victims(const residency::CandidateView&, std::size_t,
               std::vector<residency::RangeId>&) const override {}
};

}  // namespace

std::unique_ptr<residency::Policy> make_none() {
  return std::make_unique<None>();
}

}  // namespace umem::policy
