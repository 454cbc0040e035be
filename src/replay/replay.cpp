#include "replay/replay.h"

#include <atomic>
#include <chrono>
#include <string>
#include <utility>

namespace umem::replay {
namespace {

std::atomic<bool> g_open{false};

struct Closes {
  void operator()(std::atomic<bool>* open) const { *open = false; }
};

Status bad_state(const char* reason) {
  return {Code::kBadState, reason};
}

}  // namespace

Result<std::unique_ptr<Replay>> Replay::open(const Options& options) {
  if (g_open.exchange(true)) return bad_state("a replay is open already; close it first");
  std::unique_ptr<std::atomic<bool>, Closes> unless_opened(&g_open);
  std::unique_ptr<Replay> made(new Replay);
  UMEM_RETURN_IF_ERROR(made->machine_.open(options));
  made->open_ = true;
  unless_opened.release();
  return made;
}

Replay::~Replay() {
  const Status status = close();
  (void)status;  // there is no caller left to report it to
}

Status Replay::close() {
  if (!std::exchange(open_, false)) return {};
  if (step_) step_->release_all();
  Status status = machine_.close();
  g_open = false;
  return status;
}

template <class Call>
Status Replay::timed(Call call) {
  if (!open_) return bad_state("the replay is closed");
  if (failed_) return bad_state("the replay failed before; close it");
  const auto start = std::chrono::steady_clock::now();
  Status status = call();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  seconds_ += took.count();
  failed_ = !status.ok();
  return status;
}

Status Replay::set_step(StepColumns columns) {
  if (step_) return bad_state("the replay has its step already; open another one");
  return timed([&]() -> Status {
    UMEM_RETURN_IF_ERROR(columns.check());
    step_.emplace(machine_, std::move(columns));
    return step_->allocate_all();
  });
}

Status Replay::run_step(std::uint64_t repeats) {
  if (!step_) return bad_state("there is no step to run: call set_step first");
  before_ = logged_ = {};
  return timed([&]() -> Status {
    for (std::uint64_t i = 0; i < repeats; ++i) UMEM_RETURN_IF_ERROR(run_once());
    return {};
  });
}

Status Replay::run_once() {
  UMEM_RETURN_IF_ERROR(step_->run());
  events_ += step_->events();
  return {};
}

const std::vector<double>& Replay::op_end_us() const {
  static const std::vector<double> none;
  return step_ ? step_->op_end_us() : none;
}

Status Replay::run_logged() {
  if (!step_) return bad_state("there is no step to run: call set_step first");
  before_ = std::exchange(logged_, {});
  begin_us_ = machine_.now_us();
  UMEM_RETURN_IF_ERROR(soft::log_moves());
  Status ran = timed([&] { return run_once(); });
  Result<soft::Moves> moves = soft::take_moves();
  UMEM_RETURN_IF_ERROR(std::move(ran));
  if (moves.ok()) logged_ = std::move(moves.value());
  return moves.take_status();
}

Result<soft::Moves> Replay::moves() {
  if (logged_.base == 0) return bad_state("the last step has no log: call run_logged");
  for (auto* logged : {&before_, &logged_}) UMEM_RETURN_IF_ERROR(soft::settle_host(logged->rows));
  soft::Moves all{logged_.base, {}};
  for (soft::Move move : before_.rows) {
    if (move.end_us <= begin_us_ || move.end_us <= move.start_us) continue;
    move.operation = -1;
    all.rows.push_back(move);
  }
  all.rows.insert(all.rows.end(), logged_.rows.begin(), logged_.rows.end());
  for (soft::Move& move : all.rows)
    for (double* us : {&move.issued_us, &move.start_us, &move.end_us}) *us -= begin_us_;
  return all;
}

std::vector<std::uintptr_t> Replay::placed() const {
  std::vector<std::uintptr_t> addresses;
  if (!step_) return addresses;
  for (void* block : step_->placed()) addresses.push_back(reinterpret_cast<std::uintptr_t>(block));
  return addresses;
}

Result<std::uintptr_t> Replay::address(std::size_t tensor) const {
  if (!step_) return bad_state("there is no step: call set_step first");
  if (tensor >= step_->tensors())
    return Status(Code::kInvalidArgument,
                  "tensor " + std::to_string(tensor) + " of " + std::to_string(step_->tensors()));
  return reinterpret_cast<std::uintptr_t>(step_->address(tensor));
}

}  // namespace umem::replay
