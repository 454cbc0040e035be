// The tree against the plain column that it represents.
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "base/range_maximum.h"
#include "expect.h"

namespace {

using namespace umem;  // NOLINT: a test program

void compare(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::int64_t> values(n);
  for (std::int64_t& value : values) value = static_cast<std::int64_t>(random() % 100);
  RangeMaximum tree;
  tree.reset(values, 2);
  std::vector<std::int64_t> plain(values);
  plain.insert(plain.end(), values.begin(), values.end());
  for (int round = 0; round < 300; ++round) {
    const std::size_t a = random() % (2 * n + 1), b = random() % (2 * n + 1);
    const std::size_t begin = std::min(a, b), end = std::max(a, b);
    const auto first = plain.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = plain.begin() + static_cast<std::ptrdiff_t>(end);
    const std::int64_t max = begin == end ? RangeMaximum::kNothing : *std::max_element(first, last);
    EXPECT(tree.max(begin, end) == max);
    const auto bound = static_cast<std::int64_t>(random() % 200) - 50;
    std::size_t above = end;  // the place after the last one above the bound
    while (above > begin && plain[above - 1] <= bound) --above;
    const auto found = tree.last_above(begin, end, bound);
    EXPECT(found.has_value() == (above > begin));
    EXPECT(!found || *found + 1 == above);
    const auto amount = static_cast<std::int64_t>(random() % 100) - 50;
    tree.add(begin, end, amount);
    std::for_each(first, last, [&](std::int64_t& value) { value += amount; });
  }
  for (std::size_t place = 0; place < 2 * n; ++place) EXPECT(tree.at(place) == plain[place]);
  const RangeMaximum thrice(values, 3);
  for (std::size_t place = 0; place < 3 * n; ++place) EXPECT(thrice.at(place) == values[place % n]);
  tree.reset(values);
  EXPECT(tree.max(0, n) == *std::max_element(values.begin(), values.end()));
}

}  // namespace

int main() {
  for (std::size_t n : {1u, 2u, 3u, 4u, 7u, 8u, 9u, 100u})
    for (unsigned seed = 0; seed < 20; ++seed) compare(n, seed);
  return g_wrong == 0 ? 0 : 1;
}
