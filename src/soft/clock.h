// Virtual time: streams are time lines, transfers share one link a direction (full duplex), and a
// fault stalls the compute stream for the fault cost and its transfer.
//
// Work is done in program order at the call; only its *time* is virtual. `host_us` is the time of
// the calling program, which synchronising calls move forward. Not thread-safe (device.cpp locks).
#pragma once
#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "base/host_lane.h"
#include "driver/types.h"
#include "soft/profiles.h"

namespace umem::soft {

class Clock {
 public:
  explicit Clock(const Profile& profile) : profile_(profile) {}

  cu::CUstream create_stream();
  bool destroy_stream(cu::CUstream stream);
  bool known(cu::CUstream stream) const;
  cu::CUevent create_event(bool timed);
  bool destroy_event(cu::CUevent event);

  void launch(cu::CUstream stream, double us);
  // A transfer on `stream`; both directions may be requested together.
  void transfer(cu::CUstream stream, std::size_t bytes_in, std::size_t bytes_out);
  // A fault group on the default stream.
  void fault(std::size_t bytes_in, std::size_t bytes_out);

  // `ticket`: the pager's last one.
  bool record(cu::CUevent event, cu::CUstream stream, std::uint32_t ticket);
  // The ticket of a recorded event that the default stream waits for; 0 for any other.
  std::uint32_t ticket_for(cu::CUstream stream, cu::CUevent event);
  bool wait(cu::CUstream stream, cu::CUevent event);
  HostLane& host() { return host_; }
  // The next work of `stream` begins when that work of the host is over.
  void wait_for_host(cu::CUstream stream, std::size_t work);
  // When all that has been sent to the host has arrived.
  double arrived_us() const;

  void synchronize(cu::CUstream stream);
  void synchronize_all();
  bool synchronize(cu::CUevent event);
  // Each query takes 1 us, so that a polling loop ends.
  bool done(cu::CUstream stream);
  enum class EventState { kUnknown, kPending, kDone };
  EventState query(cu::CUevent event);
  enum class Elapsed { kUnknown, kNotTimed, kPending, kOk };
  Elapsed elapsed(cu::CUevent start, cu::CUevent end, float& milliseconds);

  double host_us() const { return host_us_; }
  double stall_us() const { return stall_us_; }
  // When each direction of the link has carried all that it was given.
  double in_free_us() const { return in_free_; }
  double out_free_us() const { return out_free_; }

 private:
  struct Event {
    double us = 0;
    bool timed = true;
    bool recorded = false;
    std::uint32_t ticket = 0;
  };
  double& tail(cu::CUstream stream);
  bool reached(double us);
  double enqueue(double ready, std::size_t bytes, double rate, double& lane_free);
  Event* find(cu::CUevent event);

  Profile profile_;
  std::unordered_map<std::uintptr_t, double> streams_;
  std::unordered_map<std::uintptr_t, Event> events_;
  std::uintptr_t next_handle_ = 0x1000;
  double default_tail_ = 0, host_us_ = 0, stall_us_ = 0;
  double asked_us_ = -1;  // the last time a caller was told to wait, and how often
  int asked_ = 0;
  double in_free_ = 0, out_free_ = 0;
  HostLane host_;
};

}  // namespace umem::soft
