"""Estimate of a step's time for a choice of gaps, accurate enough to compare choices."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...base.device_profiles import DeviceProfile
from ...trace.step_trace import Gaps, HostUpdates, Ints, StepTrace
from .writeback import NEVER, Quiet, quiet_times

NO_UPDATES = HostUpdates(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


class GapChoice(NamedTuple):
    """Gaps spent swapped out: a tensor leaves when op `start` has ended, in this order."""

    away: Gaps
    returns: Ints  # indices of the gaps whose tensors return for `end`, by deadline
    occupancy: Ints  # [n_ops] bytes of large tensors that are not swapped out
    after: Ints | None = None  # [gaps] the op after which the return may begin; None: `start`
    updates: HostUpdates = NO_UPDATES  # tensors are given as indices of gaps

    @property
    def begins(self) -> Ints:
        """[gaps] The op after which the return may begin."""
        return self.away.start if self.after is None else self.after


class StepEstimate(NamedTuple):
    """Estimated time of the second of two equal steps."""

    us: float
    quiet: Quiet
    # [quiet times] The op at whose start the write-back starts, in the step in which the quiet time
    # ends; NEVER: the link to the host is not idle in time.
    copied: Ints


def estimate(trace: StepTrace, device: DeviceProfile, choice: GapChoice, room: int) -> StepEstimate:
    """Estimate the second of two equal steps, with each direction of the link as a fluid.

    A return starts at the first op after which the occupancy has space for it, out of `room`
    bytes, until its use, once the tensors still leaving fit beside it and the returns before it. An
    op starts when its tensors have arrived and the tensors still leaving fit into the remaining
    space. While the link to the host is idle, also while an op waits, tensors that are not written
    again before they leave are written back, in the order in which they leave.
    """
    from ...base.native import core

    away, returns = choice.away, choice.returns
    amount = trace.bytes[away.tensor]
    ready, taken = earliest(choice, amount, room)
    # In order of deadlines, counted from the step in which the return starts.
    order = np.argsort(away.end[returns] - trace.n_ops * (ready >= trace.n_ops), kind="stable")
    returns, ready = returns[order], ready[order]
    quiet = quiet_times(trace, away)
    us, copied = core.step_estimate(
        trace.op_us,
        np.maximum(room - taken, 0) / device.bytes_per_us_out,
        start=away.start,
        # Tensors that no op writes are read-mostly: after one fetch the host's copy stays valid.
        out_us=np.where(trace.clean[away.tensor], 0.0, amount / device.bytes_per_us_out),
        in_us=amount / device.bytes_per_us_in,
        quiet=quiet.of_gap,
        returns=returns,
        return_start=ready,
        return_end=away.end[returns],
        room_us=amount[returns] / device.bytes_per_us_out,
        written=quiet.written,
        due=quiet.due,
        copy_us=trace.bytes[quiet.tensor] / device.bytes_per_us_out,
        parameter=choice.updates.parameter,
        gradient=choice.updates.gradient,
        work_us=choice.updates.us,
        never=NEVER,
    )
    return StepEstimate(us, quiet, copied)


def earliest(choice: GapChoice, amount: Ints, room: int) -> tuple[Ints, Ints]:
    """Return the op at which each return starts, and the occupancy with all of them.

    As in the engine: the tensor that is due first starts as soon as there is space for it until its
    use, and no other before it. The result is for the second of two steps: what is due there.
    """
    from ...base.native import core

    away, returns = choice.away, choice.returns
    return core.return_starts(
        choice.begins[returns], away.end[returns], amount[returns], choice.occupancy, room
    )
