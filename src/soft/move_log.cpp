#include "soft/move_log.h"

#include <utility>

#include "base/units.h"

namespace umem::soft {
namespace {

bool comes(MoveKind kind) {
  return kind == MoveKind::kIn;
}

bool goes(MoveKind kind) {
  return kind == MoveKind::kOut || kind == MoveKind::kCopy;
}

}  // namespace

void MoveLog::start() {
  moves_.clear();
  booked_ = 0;
  operation_ = 0;
  on_ = true;
}

std::vector<Move> MoveLog::take() {
  on_ = false;
  booked_ = 0;
  return std::exchange(moves_, {});
}

void MoveLog::note(MoveKind kind, std::size_t page, bool unused) {
  if (!on_) return;
  const double now = clock_.host_us();
  if (moves_.size() > booked_) {
    Move& last = moves_.back();
    if (last.kind == kind && last.unused == unused && last.page + last.pages == page &&
        last.operation == operation_ && last.issued_us == now) {
      ++last.pages;
      return;
    }
  }
  moves_.push_back({now, now, now, page, 1, operation_, kind, false, unused, 0, 0});
}

void MoveLog::note_work(std::size_t page, std::uint32_t pages, std::size_t work, double us) {
  if (!on_) return;
  const double now = clock_.host_us();
  moves_.push_back(
      {now, now, now, page, pages, operation_, MoveKind::kHost, false, false, work, us});
  booked_ = moves_.size();
}

// The lanes carry them one after another, and their ends are known.
void MoveLog::book(bool fault, const Profile& profile) {
  if (!on_) return;
  const auto backwards = [&](auto is_carried, double end, double rate) {
    for (std::size_t i = moves_.size(); i-- > booked_;) {
      Move& move = moves_[i];
      if (!is_carried(move.kind)) continue;
      move.fault = fault;
      move.end_us = end;
      end -= static_cast<double>(move.pages * kPageBytes) / rate;
      move.start_us = end;
    }
  };
  backwards(comes, clock_.in_free_us(), profile.bytes_per_us_in);
  backwards(goes, clock_.out_free_us(), profile.bytes_per_us_out);
  booked_ = moves_.size();
}

}  // namespace umem::soft
