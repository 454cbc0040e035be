// The plan's occupancy against the plain sums that it stands for.
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "expect.h"
#include "policy/occupancy.h"

namespace {

using namespace umem;  // NOLINT: a test program

void compare(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::int64_t> step(n);
  for (std::int64_t& bytes : step) bytes = static_cast<std::int64_t>(random() % 100);
  policy::Occupancy occupancy;
  occupancy.reset(step);
  std::vector<std::int64_t> plain(step);
  plain.insert(plain.end(), step.begin(), step.end());
  for (int round = 0; round < 300; ++round) {
    const std::size_t a = random() % (2 * n + 1), b = random() % (2 * n + 1);
    const std::size_t begin = std::min(a, b), end = std::max(a, b);
    const auto first = plain.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = plain.begin() + static_cast<std::ptrdiff_t>(end);
    EXPECT(occupancy.most(begin, end) == (begin == end ? 0 : *std::max_element(first, last)));
    const auto bytes = static_cast<std::int64_t>(random() % 50);
    occupancy.add(begin, end, bytes);
    std::for_each(first, last, [&](std::int64_t& value) { value += bytes; });
  }
  occupancy.reset(step);
  EXPECT(occupancy.most(0, 2 * n) == *std::max_element(step.begin(), step.end()));
}

}  // namespace

int main() {
  for (std::size_t n : {1u, 2u, 3u, 4u, 7u, 8u, 9u, 100u})
    for (unsigned seed = 0; seed < 20; ++seed) compare(n, seed);
  return g_wrong == 0 ? 0 : 1;
}
