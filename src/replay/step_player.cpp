#include "replay/step_player.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "base/units.h"

namespace umem::replay {
namespace {

Status bad(const std::string& reason) {
  return {Code::kInvalidArgument, "set_step: " + reason};
}

std::string tensor_text(std::size_t tensor) {
  return "tensor " + std::to_string(tensor) + " ";
}

Status check_tensor(const StepColumns& c, std::size_t t) {
  const auto n = static_cast<std::int64_t>(c.ops());
  const auto m = static_cast<std::int64_t>(c.tensors());
  if (c.bytes[t] < 0) return bad(tensor_text(t) + "has a negative size");
  if (c.kind[t] < 0 || c.kind[t] > static_cast<std::int64_t>(Kind::kCarried))
    return bad(tensor_text(t) + "has the unknown kind " + std::to_string(c.kind[t]));
  const Kind kind = static_cast<Kind>(c.kind[t]);
  const bool begins = kind == Kind::kTransient || kind == Kind::kMade;
  const bool ends = kind == Kind::kTransient || kind == Kind::kCarried;
  if (begins && (c.first[t] < 0 || c.first[t] >= n))
    return bad(tensor_text(t) + "begins at op " + std::to_string(c.first[t]) + " of " +
               std::to_string(n));
  if (ends && (c.last[t] < -1 || c.last[t] >= n || (begins && c.last[t] < c.first[t])))
    return bad(tensor_text(t) + "ends at op " + std::to_string(c.last[t]) + " of " +
               std::to_string(n));
  if (kind != Kind::kCarried || c.next_alias[t] == -1) return {};
  const bool known = c.next_alias[t] >= 0 && c.next_alias[t] < m;
  if (!known ||
      c.kind[static_cast<std::size_t>(c.next_alias[t])] != static_cast<std::int64_t>(Kind::kMade))
    return bad(tensor_text(t) + "is carried, and its next-step alias " +
               std::to_string(c.next_alias[t]) + " is no tensor of kind MADE");
  return {};
}

Status check_access(const StepColumns& c, std::int64_t op, std::int64_t tensor) {
  if (tensor < 0 || tensor >= static_cast<std::int64_t>(c.tensors()))
    return bad("op " + std::to_string(op) + " accesses the unknown tensor " +
               std::to_string(tensor));
  const auto t = static_cast<std::size_t>(tensor);
  const Kind kind = static_cast<Kind>(c.kind[t]);
  const bool begins = kind == Kind::kTransient || kind == Kind::kMade;
  const bool ends = kind == Kind::kTransient || kind == Kind::kCarried;
  if ((begins && op < c.first[t]) || (ends && op > c.last[t]))
    return bad("op " + std::to_string(op) + " accesses " + tensor_text(t) + "outside of its life");
  return {};
}

Status check_update(const StepColumns& c, std::size_t k) {
  const auto known = [&](std::int64_t t) {
    return t >= 0 && t < static_cast<std::int64_t>(c.tensors()) &&
           c.bytes[static_cast<std::size_t>(t)] > 0;
  };
  const std::string text = "update " + std::to_string(k) + " ";
  if (!known(c.update_parameter[k]) || !known(c.update_gradient[k]))
    return bad(text + "names a tensor that the step has not");
  if (static_cast<Kind>(c.kind[static_cast<std::size_t>(c.update_parameter[k])]) !=
      Kind::kPersistent)
    return bad(text + "is of a parameter that does not persist");
  if (static_cast<Kind>(c.kind[static_cast<std::size_t>(c.update_gradient[k])]) != Kind::kTransient)
    return bad(text + "has a gradient that is not made and freed in the step");
  if (!(c.update_us[k] >= 0) || std::isinf(c.update_us[k]))
    return bad(text + "has a duration that is negative or not finite");
  return {};
}

}  // namespace

// After the tensors' columns have one length, and the accesses' too.
static Status check_parts(const StepColumns& columns) {
  const auto& rows = columns.part_access;
  if (columns.part_begin.size() != rows.size() || columns.part_end.size() != rows.size())
    return bad("the columns of parts differ in length");
  if (!std::is_sorted(rows.begin(), rows.end())) return bad("part_access does not ascend");
  for (std::size_t k = 0; k < rows.size(); ++k) {
    if (rows[k] < 0 || rows[k] >= static_cast<std::int64_t>(columns.access_tensor.size()))
      return bad("a part is of no access");
    const std::int64_t tensor = columns.access_tensor[static_cast<std::size_t>(rows[k])];
    if (tensor < 0 || tensor >= static_cast<std::int64_t>(columns.bytes.size()))
      return bad("an access is of no tensor");
    if (columns.part_begin[k] < 0 || columns.part_begin[k] >= columns.part_end[k] ||
        columns.part_end[k] > columns.bytes[static_cast<std::size_t>(tensor)])
      return bad("a part is not within its tensor");
  }
  return {};
}

Status StepColumns::check() const {
  const std::size_t m = tensors();
  if (ops() == 0) return bad("a step has at least one op");
  for (const auto* column : {&kind, &first, &last, &next_alias})
    if (column->size() != m) return bad("the columns of tensors differ in length");
  if (tag.size() != m || family.size() != m) return bad("the columns of tensors differ in length");
  if (access_start.size() != ops() + 1 || access_start.front() != 0 ||
      access_start.back() != static_cast<std::int64_t>(access_tensor.size()) ||
      access_write.size() != access_tensor.size())
    return bad("access_start does not fit op_us, access_tensor and access_write");
  for (double us : op_us)
    if (!(us >= 0) || std::isinf(us)) return bad("a duration is negative or not finite");
  if (!op_name.empty() && op_name.size() != ops()) return bad("op_name does not fit op_us");
  for (std::int64_t name : op_name)
    if (name < 0 || name >= static_cast<std::int64_t>(names.size()))
      return bad("op_name has a number that is no name's");
  if (update_parameter.size() != updates() || update_gradient.size() != updates())
    return bad("the columns of updates differ in length");
  UMEM_RETURN_IF_ERROR(check_parts(*this));
  for (std::size_t t = 0; t < m; ++t) UMEM_RETURN_IF_ERROR(check_tensor(*this, t));
  for (std::size_t k = 0; k < updates(); ++k) UMEM_RETURN_IF_ERROR(check_update(*this, k));
  for (std::size_t i = 0; i < ops(); ++i) {
    if (access_start[i] > access_start[i + 1] || access_start[i + 1] > access_start.back())
      return bad("access_start decreases");
    for (std::int64_t a = access_start[i]; a < access_start[i + 1]; ++a)
      UMEM_RETURN_IF_ERROR(check_access(*this, static_cast<std::int64_t>(i),
                                        access_tensor[static_cast<std::size_t>(a)]));
  }
  return {};
}

// `when` is the op of a tensor, or -1 for none; in the order of tensors within an op.
template <class When>
void StepPlayer::Schedule::fill(std::size_t ops, std::size_t tensors, When when) {
  start.assign(ops + 1, 0);
  for (std::size_t t = 0; t < tensors; ++t)
    if (const std::int64_t op = when(t); op >= 0) ++start[static_cast<std::size_t>(op) + 1];
  for (std::size_t i = 0; i < ops; ++i) start[i + 1] += start[i];
  ids.resize(start.back());
  std::vector<std::uint32_t> at(start.begin(), start.end() - 1);
  for (std::size_t t = 0; t < tensors; ++t)
    if (const std::int64_t op = when(t); op >= 0)
      ids[at[static_cast<std::size_t>(op)]++] = static_cast<std::uint32_t>(t);
}

StepPlayer::StepPlayer(Machine& machine, StepColumns columns)
    : machine_(machine),
      columns_(std::move(columns)),
      blocks_(columns_.tensors()),
      placed_(columns_.tensors()) {
  const std::size_t n = columns_.ops(), m = columns_.tensors();
  begins_.fill(n, m, [&](std::size_t t) {
    return kind(t) == Kind::kTransient || kind(t) == Kind::kMade ? columns_.first[t] : -1;
  });
  ends_.fill(n + 1, m, [&](std::size_t t) {
    return kind(t) == Kind::kTransient || kind(t) == Kind::kCarried ? columns_.last[t] + 1 : -1;
  });
  std::vector<bool> has_carrier(m);
  for (std::size_t t = 0; t < m; ++t) {
    if (kind(t) != Kind::kCarried) continue;
    (columns_.next_alias[t] < 0 ? opening_ : carried_).push_back(static_cast<std::uint32_t>(t));
    if (columns_.next_alias[t] >= 0)
      has_carrier[static_cast<std::size_t>(columns_.next_alias[t])] = true;
  }
  for (std::size_t t = 0; t < m; ++t)
    if (kind(t) == Kind::kMade && !has_carrier[t])
      closing_.push_back(static_cast<std::uint32_t>(t));
  std::vector<std::int64_t> last_use(m, -1);
  std::vector<std::int64_t> first_use(m, static_cast<std::int64_t>(n));
  for (std::size_t i = n; i-- > 0;)
    for (std::int64_t a = columns_.access_start[i]; a < columns_.access_start[i + 1]; ++a) {
      const auto t = static_cast<std::size_t>(columns_.access_tensor[static_cast<std::size_t>(a)]);
      first_use[t] = static_cast<std::int64_t>(i);
      last_use[t] = std::max(last_use[t], static_cast<std::int64_t>(i));
    }
  arrived_.resize(m);
  for (const std::int64_t t : columns_.update_gradient) arrived_[static_cast<std::size_t>(t)] = {0};
  for (const std::int64_t t : columns_.update_parameter)
    due_.push_back(first_use[static_cast<std::size_t>(t)]);
  updates_.fill(n + 1, columns_.updates(), [&](std::size_t k) {
    return 1 + std::max(last_use[static_cast<std::size_t>(columns_.update_parameter[k])],
                        columns_.last[static_cast<std::size_t>(columns_.update_gradient[k])]);
  });
  events_ = n + begins_.ids.size() + ends_.ids.size() + opening_.size() + closing_.size() + 1;
}

Status StepPlayer::allocate(std::size_t tensor) {
  Result<void*> got = machine_.allocate(static_cast<std::size_t>(columns_.bytes[tensor]),
                                        columns_.tag[tensor], columns_.family[tensor]);
  if (!got.ok()) return got.take_status();
  blocks_[tensor] = placed_[tensor] = got.value();
  return {};
}

void StepPlayer::release(std::size_t tensor) {
  if (void* block = std::exchange(blocks_[tensor], nullptr)) machine_.release(block);
}

Status StepPlayer::allocate_all() {
  for (std::size_t t = 0; t < columns_.tensors(); ++t) {
    const bool alive =
        kind(t) == Kind::kPersistent || (kind(t) == Kind::kCarried && columns_.next_alias[t] >= 0);
    if (alive) UMEM_RETURN_IF_ERROR(allocate(t));
  }
  return {};
}

Status StepPlayer::send_gradient(std::size_t tensor) {
  arrived_[tensor].clear();
  const auto base = reinterpret_cast<std::uintptr_t>(blocks_[tensor]);
  const auto bytes = static_cast<std::size_t>(columns_.bytes[tensor]);
  for (std::size_t at = 0; at < bytes; at += kPieceBytes) {
    Result<double> sent = machine_.send_to_host(base + at, std::min(kPieceBytes, bytes - at));
    if (!sent.ok()) return sent.take_status();
    arrived_[tensor].push_back(sent.value());
  }
  leaving_.push_back({std::exchange(blocks_[tensor], nullptr), arrived_[tensor].back()});
  return {};
}

void StepPlayer::release_arrived(double by_us) {
  for (; !leaving_.empty() && leaving_.front().arrived_us <= by_us; leaving_.pop_front())
    machine_.release(leaving_.front().block);
}

// Piece by piece, each with the same share of the gradient.
Status StepPlayer::update(std::size_t which) {
  const auto tensor = static_cast<std::size_t>(columns_.update_parameter[which]);
  const auto bytes = static_cast<std::size_t>(columns_.bytes[tensor]);
  const auto base = reinterpret_cast<std::uintptr_t>(blocks_[tensor]);
  const auto& arrived = arrived_[static_cast<std::size_t>(columns_.update_gradient[which])];
  const std::size_t pieces = (bytes + kPieceBytes - 1) / kPieceBytes;
  const double due = static_cast<double>(due_[which]) + static_cast<double>(runs_ * columns_.ops());
  for (std::size_t i = 0; i < pieces; ++i) {
    const std::size_t at = i * kPieceBytes, part = std::min(kPieceBytes, bytes - at);
    const double share = static_cast<double>(part) / static_cast<double>(bytes);
    const double ready = arrived[((i + 1) * arrived.size() + pieces - 1) / pieces - 1];
    UMEM_RETURN_IF_ERROR(
        machine_.host_work(base + at, part, ready, columns_.update_us[which] * share, due));
  }
  return {};
}

Status StepPlayer::end_before(std::size_t i) {
  for (std::uint32_t k = ends_.start[i]; k < ends_.start[i + 1]; ++k) {
    const std::uint32_t tensor = ends_.ids[k];
    if (arrived_[tensor].empty()) {
      release(tensor);
    } else {
      UMEM_RETURN_IF_ERROR(send_gradient(tensor));
    }
  }
  release_arrived(machine_.now_us());
  for (std::uint32_t k = updates_.start[i]; k < updates_.start[i + 1]; ++k)
    UMEM_RETURN_IF_ERROR(update(updates_.ids[k]));
  return {};
}

template <class Act>
void StepPlayer::each_part(std::size_t first, std::size_t last, Act act) const {
  const auto& rows = columns_.part_access;
  auto row = static_cast<std::size_t>(
      std::lower_bound(rows.begin(), rows.end(), static_cast<std::int64_t>(first)) - rows.begin());
  for (std::size_t a = first; a < last; ++a) {
    const auto named = [&] {
      return row < rows.size() && rows[row] == static_cast<std::int64_t>(a);
    };
    if (!named()) {
      const auto tensor = static_cast<std::size_t>(columns_.access_tensor[a]);
      act(a, 0, static_cast<std::size_t>(columns_.bytes[tensor]));
    }
    for (; named(); ++row)
      act(a, static_cast<std::size_t>(columns_.part_begin[row]),
          static_cast<std::size_t>(columns_.part_end[row] - columns_.part_begin[row]));
  }
}

Status StepPlayer::op(std::size_t i) {
  UMEM_RETURN_IF_ERROR(end_before(i));
  const auto first = static_cast<std::size_t>(columns_.access_start[i]);
  const auto last = static_cast<std::size_t>(columns_.access_start[i + 1]);
  const auto tensor = [&](std::size_t a) {
    return static_cast<std::size_t>(columns_.access_tensor[a]);
  };
  machine_.inputs().clear();
  each_part(first, last, [&](std::size_t a, std::size_t begin, std::size_t bytes) {
    if (void* block = blocks_[tensor(a)]) machine_.inputs().push_back({block, begin, bytes});
  });
  const auto& name = columns_.op_name;
  machine_.begin(name.empty() ? "" : columns_.names[static_cast<std::size_t>(name[i])].c_str());
  for (std::uint32_t k = begins_.start[i]; k < begins_.start[i + 1]; ++k) {
    if (Status status = allocate(begins_.ids[k]); !status.ok()) {
      machine_.abandon();
      return status;
    }
  }
  machine_.accesses().clear();
  each_part(first, last, [&](std::size_t a, std::size_t begin, std::size_t bytes) {
    if (void* block = blocks_[tensor(a)])
      machine_.accesses().push_back(
          {reinterpret_cast<std::uintptr_t>(block) + begin, bytes, columns_.access_write[a] != 0});
  });
  Status ended = machine_.end(columns_.op_us[i]);
  op_end_us_[i] = machine_.step_time_us();
  return ended;
}

Status StepPlayer::run() {
  placed_ = blocks_;
  for (std::uint32_t t : opening_) UMEM_RETURN_IF_ERROR(allocate(t));
  const std::size_t n = columns_.ops();
  op_end_us_.resize(n);
  for (std::size_t i = 0; i < n; ++i) UMEM_RETURN_IF_ERROR(op(i));
  UMEM_RETURN_IF_ERROR(end_before(n));
  for (std::uint32_t t : closing_) release(t);
  for (std::uint32_t t : carried_)
    blocks_[t] = std::exchange(blocks_[static_cast<std::size_t>(columns_.next_alias[t])], nullptr);
  ++runs_;
  machine_.end_step();
  return {};
}

void StepPlayer::release_all() {
  release_arrived(std::numeric_limits<double>::infinity());
  for (std::size_t t = 0; t < blocks_.size(); ++t) release(t);
}

}  // namespace umem::replay
