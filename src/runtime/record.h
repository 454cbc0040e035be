// The hooks' reports to the recorder, and the calls that start, stop and read it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/export.h"
#include "base/status.h"
#include "runtime/op.h"
#include "trace/recorder.h"

namespace umem::runtime {

struct Device;
struct State;

// kBadState if umem is off.
UMEM_API Status record_start(trace::Sink sink);
UMEM_API void record_stop(trace::Sink sink);
UMEM_API trace::Batch record_take(trace::Sink sink, bool all);
UMEM_API std::size_t record_waiting(trace::Sink sink);

// Called while the recorder is on, for ops that are not scope markers. The recorder identifies
// blocks by their first byte: between these two calls each device reports its own inputs, under its
// lock.
void begin_addresses(const Input* inputs, std::size_t count);
void note_addresses(const State& s, const Device& device, const Input* inputs, std::size_t count);
// Keeps the calling thread's addresses while a callback runs, whose own ops report theirs.
class KeptAddresses {
 public:
  KeptAddresses();
  ~KeptAddresses();
  KeptAddresses(const KeptAddresses&) = delete;
  KeptAddresses& operator=(const KeptAddresses&) = delete;

 private:
  std::vector<trace::Used> kept_;
};
// Called without a device's lock.
void record_begin(State& s, Op& op);
void record_end(State& s, Op& op, Op* parent, residency::Tag tag);

}  // namespace umem::runtime
