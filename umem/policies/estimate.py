"""How long a step takes when a set of gaps is spent away: enough to prefer one set to another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..devices import DeviceProfile
from ..trace.step import Gaps, Ints, StepTrace
from .writeback import NEVER, Quiet, quiet_times


class Choice(NamedTuple):
    """Gaps spent away: a tensor leaves when `start` has ended, in that order."""

    away: Gaps
    returns: Ints  # indices of those that come back for `end`, by deadline
    occupancy: Ints  # [n_ops] bytes of large tensors that are not away


class Estimate(NamedTuple):
    """The second of two equal steps."""

    us: float
    quiet: Quiet
    # [quiet times] The op at whose begin the write-back starts, by the step in which the quiet time
    # ends; NEVER: the link out is not idle in time.
    copied: Ints


def estimate(trace: StepTrace, device: DeviceProfile, choice: Choice, room: int) -> Estimate:
    """How long the second of two equal steps takes, with each direction of the link as a fluid.

    A return starts at the first op from which on the occupancy leaves room for it, out of `room`
    bytes, until its use. An op starts when its tensors are there and what is still leaving takes no
    more than the room that is left. While the link out is idle, what has been written for the last
    time before it leaves is written back, what leaves first to begin with.
    """
    from ..native import core

    away, returns, _ = choice
    amount = trace.bytes[away.tensor]
    ready, taken = earliest(choice, amount, room)
    quiet = quiet_times(trace, away)
    us, copied = core.step_estimate(
        trace.op_us,
        np.maximum(room - taken, 0) / device.bytes_per_us_out,
        start=away.start,
        # What nothing writes is read-mostly: the host's copy is valid once it has come from there.
        out_us=np.where(trace.clean[away.tensor], 0.0, amount / device.bytes_per_us_out),
        in_us=amount / device.bytes_per_us_in,
        quiet=quiet.of_gap,
        returns=returns,
        return_start=ready,
        return_end=away.end[returns],
        written=quiet.written,
        due=quiet.due,
        copy_us=trace.bytes[quiet.tensor] / device.bytes_per_us_out,
        never=NEVER,
    )
    return Estimate(us, quiet, copied)


def earliest(choice: Choice, amount: Ints, room: int) -> tuple[Ints, Ints]:
    """The op at which each return starts, and the occupancy with all of them.

    As the engine does it: of what is away the one that is due first starts as soon as there is room
    for it until its use, and no other before it. The second of two steps.
    """
    from ..native import core

    away, returns, occupancy = choice
    return core.return_starts(
        away.start[returns], away.end[returns], amount[returns], occupancy, room
    )
