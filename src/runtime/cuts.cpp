#include "runtime/cuts.h"

#include "runtime/pinned.h"
#include "runtime/state.h"

namespace umem::runtime {

using managed::RangeId;

void cut_as_others(State& s, Device& device, RangeId id) {
  const RangeId head = s.ranges[id].head;
  const std::size_t bytes = s.ranges[head].bytes, piece = s.ranges.piece_of(bytes);
  engine::Engine& engine = device.engine;
  if (s.ranges.piece_bytes(head, bytes) <= piece) return;
  const managed::MemSpan range{s.ranges[head].base, bytes};
  take_pins_off(s, device, range);
  if (engine.begin_cut(head))
    s.ranges.cut(head, piece,
                 [&](RangeId cut, RangeId rest, std::size_t at) { engine.split(cut, rest, at); });
  put_pins_on(s, device, range);
}

}  // namespace umem::runtime
