// The spans of bytes that a program names, with the locks of the devices that they are on.
#pragma once
#include "base/status.h"
#include "runtime/device_lock.h"
#include "runtime/pin.h"

namespace umem::runtime {

// The devices that have some of them, as far as is known without a lock.
DeviceMask devices_of(const State& s, const MemSpans& spans);
// All of it is live memory of umem's.
Status check_spans(const State& s, const HeldDevices& held, const MemSpans& spans);
// What of it is away comes in, none of it in the place of another part.
Status bring_in(const State& s, const HeldDevices& held, const MemSpans& spans);

}  // namespace umem::runtime
