#include "policy/plan.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/units.h"

namespace umem::policy {
namespace {

constexpr std::int64_t kMax = std::int64_t{1} << 30;  // ops and tensors of one step

Status bad(const std::string& column, const std::string& why) {
  return {Code::kInvalidArgument, "plan column '" + column + "': " + why};
}

Status in_range(const char* column, const Ints& values, std::int64_t low, std::int64_t high) {
  for (std::size_t i = 0; i < values.size(); ++i)
    if (values[i] < low || values[i] > high)
      return bad(column, std::to_string(values[i]) + " at " + std::to_string(i) + " is not in " +
                             std::to_string(low) + " to " + std::to_string(high));
  return {};
}

Status has_length(const char* column, const Ints& values, std::int64_t length) {
  if (static_cast<std::int64_t>(values.size()) == length) return {};
  return bad(column, std::to_string(values.size()) + " values, and " + std::to_string(length) +
                         " are needed");
}

// Checks that each tensor occurs at most `max` times in each run of the column given by `start`.
Status distinct(const char* column, const Ints& tensors, const Ints& start, std::int64_t m) {
  std::vector<std::size_t> seen(static_cast<std::size_t>(m), 0);
  for (std::size_t run = 0; run + 1 < start.size(); ++run)
    for (std::int64_t at = start[run]; at < start[run + 1]; ++at) {
      std::size_t& last = seen[static_cast<std::size_t>(tensors[static_cast<std::size_t>(at)])];
      if (last == run + 1)
        return bad(column, "tensor " + std::to_string(tensors[static_cast<std::size_t>(at)]) +
                               " is there twice");
      last = run + 1;
    }
  return {};
}

Status check_tensors(const Plan& p) {
  const std::int64_t m = p.n_tensors();
  UMEM_RETURN_IF_ERROR(in_range("bytes", p.bytes, 1, std::numeric_limits<std::int64_t>::max() / 4));
  for (std::int64_t bytes : p.bytes)
    if (bytes % static_cast<std::int64_t>(kPageBytes) != 0)
      return bad("bytes", std::to_string(bytes) + " is not a multiple of the page, 2 MiB");
  UMEM_RETURN_IF_ERROR(has_length("kind", p.kind, m));
  UMEM_RETURN_IF_ERROR(in_range("kind", p.kind, 0, 3));
  UMEM_RETURN_IF_ERROR(has_length("next_alias", p.next_alias, m));
  UMEM_RETURN_IF_ERROR(in_range("next_alias", p.next_alias, -1, m - 1));
  UMEM_RETURN_IF_ERROR(has_length("address", p.address, m));
  UMEM_RETURN_IF_ERROR(has_length("segment", p.segment, m));
  UMEM_RETURN_IF_ERROR(in_range("segment", p.segment, 0, 1));
  for (std::size_t t = 0; t < p.bytes.size(); ++t) {
    if (p.next_alias[t] < 0) continue;
    const auto next_alias = static_cast<std::size_t>(p.next_alias[t]);
    if (p.kind[t] != static_cast<std::int64_t>(Kind::kCarried) ||
        p.kind[next_alias] != static_cast<std::int64_t>(Kind::kMade) ||
        p.bytes[next_alias] != p.bytes[t])
      return bad("next_alias",
                 "tensor " + std::to_string(t) +
                     " and its next-step alias are not carried and made, of equal bytes");
  }
  UMEM_RETURN_IF_ERROR(in_range("allocations", p.allocations, 0, m - 1));
  UMEM_RETURN_IF_ERROR(
      has_length("allocated", p.allocated, static_cast<std::int64_t>(p.allocations.size())));
  UMEM_RETURN_IF_ERROR(in_range("allocated", p.allocated, 0, p.n_ops - 1));
  if (!std::is_sorted(p.allocated.begin(), p.allocated.end()))
    return bad("allocated", "does not ascend");
  return distinct("allocations", p.allocations,
                  {0, static_cast<std::int64_t>(p.allocations.size())}, m);
}

Status check_accesses(const Plan& p) {
  const auto accesses = static_cast<std::int64_t>(p.access_tensor.size());
  UMEM_RETURN_IF_ERROR(has_length("access_start", p.access_start, p.n_ops + 1));
  if (p.access_start.front() != 0 || p.access_start.back() != accesses)
    return bad("access_start", "does not lead from 0 to the number of accesses");
  for (std::size_t i = 1; i < p.access_start.size(); ++i)
    if (p.access_start[i] <= p.access_start[i - 1])
      return bad("access_start", "op " + std::to_string(i - 1) + " has no access");
  UMEM_RETURN_IF_ERROR(in_range("access_tensor", p.access_tensor, 0, p.n_tensors() - 1));
  UMEM_RETURN_IF_ERROR(has_length("op", p.op, p.n_ops));
  return distinct("access_tensor", p.access_tensor, p.access_start, p.n_tensors());
}

// The op at which each item must be done, or ends, if it starts after another op.
Status check_later(const char* column, const Ints& later, const Ints& after, std::int64_t max) {
  UMEM_RETURN_IF_ERROR(has_length(column, later, static_cast<std::int64_t>(after.size())));
  UMEM_RETURN_IF_ERROR(in_range(column, later, 0, max));
  for (std::size_t i = 0; i < later.size(); ++i)
    if (later[i] <= after[i])
      return bad(column, std::to_string(later[i]) + " at " + std::to_string(i) +
                             " is not after the op that it starts at");
  return {};
}

Status check_moves(const Plan& p) {
  const std::int64_t m = p.n_tensors(), n = p.n_ops;
  struct Column {
    const char* after_name;
    const Ints& after;
    const char* tensor_name;
    const Ints& tensor;
  };
  for (const Column& c : {Column{"evict_after", p.evict_after, "evict_tensor", p.evict_tensor},
                          Column{"cold_after", p.cold_after, "cold_tensor", p.cold_tensor},
                          Column{"fetch_after", p.fetch_after, "fetch_tensor", p.fetch_tensor},
                          Column{"copy_after", p.copy_after, "copy_tensor", p.copy_tensor}}) {
    UMEM_RETURN_IF_ERROR(in_range(c.after_name, c.after, -1, n - 1));
    UMEM_RETURN_IF_ERROR(
        has_length(c.tensor_name, c.tensor, static_cast<std::int64_t>(c.after.size())));
    UMEM_RETURN_IF_ERROR(in_range(c.tensor_name, c.tensor, 0, m - 1));
  }
  UMEM_RETURN_IF_ERROR(check_later("fetch_by", p.fetch_by, p.fetch_after, 2 * n - 1));
  UMEM_RETURN_IF_ERROR(check_later("copy_until", p.copy_until, p.copy_after, 2 * n));
  UMEM_RETURN_IF_ERROR(in_range("keep", p.keep, 0, m - 1));
  UMEM_RETURN_IF_ERROR(in_range("read_mostly", p.read_mostly, 0, m - 1));
  for (std::int64_t tensor : p.read_mostly)
    if (p.kind[static_cast<std::size_t>(tensor)] != static_cast<std::int64_t>(Kind::kPersistent))
      return bad("read_mostly", "tensor " + std::to_string(tensor) + " is not persistent");
  return in_range("waits", p.waits, -1, n - 1);
}

Status check_numbers(const Plan& p) {
  constexpr std::int64_t max_bytes = std::numeric_limits<std::int64_t>::max() / 4;
  UMEM_RETURN_IF_ERROR(in_range("gated", {p.gated}, 0, 1));
  UMEM_RETURN_IF_ERROR(in_range("order", {p.order}, 0, 2));
  UMEM_RETURN_IF_ERROR(in_range("window", {p.window}, 0, kMax));
  UMEM_RETURN_IF_ERROR(in_range("headroom", {p.headroom}, 0, max_bytes));
  UMEM_RETURN_IF_ERROR(in_range("capacity", {p.capacity}, 0, max_bytes));
  UMEM_RETURN_IF_ERROR(in_range("occupancy", p.occupancy, -max_bytes, max_bytes));
  UMEM_RETURN_IF_ERROR(in_range("cut", p.cut, 1, max_bytes));
  return p.gated ? has_length("occupancy", p.occupancy, p.n_ops) : Status();
}

}  // namespace

Status check(const Plan& plan) {
  UMEM_RETURN_IF_ERROR(in_range("n_ops", {plan.n_ops}, 1, kMax));
  if (plan.n_tensors() > kMax) return bad("bytes", "more than 2^30 tensors");
  UMEM_RETURN_IF_ERROR(check_tensors(plan));
  UMEM_RETURN_IF_ERROR(check_accesses(plan));
  UMEM_RETURN_IF_ERROR(check_moves(plan));
  return check_numbers(plan);
}

bool same_step(const Plan& one, const Plan& two) {
  return one.n_ops == two.n_ops && one.bytes == two.bytes && one.kind == two.kind &&
         one.next_alias == two.next_alias && one.segment == two.segment &&
         one.allocations == two.allocations && one.allocated == two.allocated &&
         one.access_start == two.access_start && one.access_tensor == two.access_tensor &&
         one.op == two.op;
}

// FNV-1a.
std::int64_t number_of(std::string_view op) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : op) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return static_cast<std::int64_t>(hash);
}

// Copies what stays field by field, so that a new column of moves is left out by default.
Plan without_moves(const Plan& plan) {
  Plan made;
  made.n_ops = plan.n_ops;
  made.bytes = plan.bytes;
  made.kind = plan.kind;
  made.next_alias = plan.next_alias;
  made.address = plan.address;
  made.segment = plan.segment;
  made.allocations = plan.allocations;
  made.allocated = plan.allocated;
  made.access_start = plan.access_start;
  made.access_tensor = plan.access_tensor;
  made.op = plan.op;
  made.read_mostly = plan.read_mostly;
  return made;
}

bool moves_anything(const Plan& plan) {
  return !plan.evict_after.empty() || !plan.cold_after.empty() || !plan.fetch_after.empty() ||
         !plan.copy_after.empty();
}

bool leaves_victims_to_lru(const Plan& plan) {
  return !moves_anything(plan) && plan.keep.empty() && plan.window == 0 &&
         static_cast<Order>(plan.order) == Order::kLru;
}

}  // namespace umem::policy
