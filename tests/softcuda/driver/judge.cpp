#include "judge.h"

#include <algorithm>

#include "races.h"

namespace softcuda {
namespace {

bool may_be_judged(const Judgement& next) {
  return (!next.flag || next.flag->seen) &&
         std::all_of(next.after.begin(), next.after.end(),
                     [](const KnownRef& known) { return known->final; });
}

}  // namespace

bool Flag::satisfied() const {
  const std::uint32_t now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  return equal ? now == value : static_cast<std::int32_t>(now - value) >= 0;
}

KnownRef known_after(Strand& strand) {
  const bool final = strand.unjudged.empty();
  auto known = std::make_shared<Known>(Known{final ? strand.clock : Clock(), final});
  if (!final) strand.unjudged.back().results.push_back(known);
  return known;
}

std::vector<KnownRef> all_known_after(Strand& strand) {
  std::vector<KnownRef> all = strand.after;
  all.push_back(known_after(strand));
  return all;
}

void follow(Strand& strand, const KnownRef& known) {
  if (known->final && strand.unjudged.empty())
    strand.clock.join(known->clock);
  else
    strand.after.push_back(known);
}

void follow(Strand& strand, Strand& other) {
  if (other.unjudged.empty() && strand.unjudged.empty())
    strand.clock.join(other.clock);
  else
    follow(strand, known_after(other));
}

void enter(Strand& strand, Judgement judgement) {
  judgement.after = std::move(strand.after);
  strand.after.clear();
  strand.unjudged.push_back(std::move(judgement));
  judge(strand);
}

bool judge(Strand& strand) {
  bool any = false;
  while (!strand.unjudged.empty() && may_be_judged(strand.unjudged.front())) {
    Judgement next = std::move(strand.unjudged.front());
    strand.unjudged.pop_front();
    for (const KnownRef& known : next.after) strand.clock.join(known->clock);
    if (next.flag) strand.clock.join(next.flag->writer);
    races().enqueued(strand, next.accesses);
    for (const KnownRef& known : next.results) *known = {strand.clock, true};
    any = true;
  }
  return any;
}

}  // namespace softcuda
