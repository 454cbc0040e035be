// The host as one lane of work in virtual time, such as updates of parameters by an optimizer.
#pragma once
#include <algorithm>
#include <cstddef>
#include <tuple>
#include <vector>

namespace umem {

// Among the ready work the smallest `due` runs first, and is not interrupted. Turns are assigned as
// late as possible, when an end is queried, because work that is due earlier may still be added.
class HostLane {
 public:
  // Adds work of `us` that may start at `ready`. Returns its number.
  std::size_t add(double ready, double us, double due) {
    work_.push_back({ready, us, due, 0, false});
    return work_.size() - 1;
  }
  // The time at which this work ends.
  double end_of(std::size_t number) {
    while (!work_[number].over) {
      Work* next = nullptr;
      for (std::size_t i = first_; i < work_.size(); ++i)
        if (!work_[i].over && (!next || turn(work_[i]) < turn(*next))) next = &work_[i];
      free_ = next->end = std::max(free_, next->ready) + next->us;
      next->over = true;
      while (first_ < work_.size() && work_[first_].over) ++first_;
    }
    return work_[number].end;
  }

 private:
  struct Work {
    double ready, us, due, end;
    bool over;  // it has had its turn
  };
  std::tuple<bool, double, double> turn(const Work& work) const {
    const bool waits = work.ready > free_;
    return {waits, waits ? work.ready : work.due, work.due};
  }

  std::vector<Work> work_;
  std::size_t first_ = 0;  // work before this has had its turn
  double free_ = 0;
};

}  // namespace umem
