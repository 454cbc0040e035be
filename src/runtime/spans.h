// The spans of bytes that a program names, with the locks of the devices that they are on.
#pragma once
#include "base/status.h"
#include "runtime/device_lock.h"
#include "runtime/pin.h"

namespace umem::runtime {

// The devices that own parts of the spans, as far as is known without a lock.
DeviceMask devices_of(const State& s, const MemSpans& spans);
// kInvalidArgument unless all of it is live memory of umem.
Status check_spans(const State& s, const HeldDevices& held, const MemSpans& spans);
// Brings in the parts that are away. No part is evicted for another.
Status bring_in(const State& s, const HeldDevices& held, const MemSpans& spans);

}  // namespace umem::runtime
