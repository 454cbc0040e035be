"""The choice of the parameters that the host updates, from a recorded step."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from ..integrations.torch.version import require_torch
from . import session

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..recompute.planner.host_updates import Candidates, Update
    from ..trace.step_trace import StepTrace
    from .planned_step import PlannedStep

_MEASURED_BYTES = 64 << 20  # of each of the four tensors of a trial update: more than the caches
_TRIALS = 3
_BETTER = 0.99  # the largest share of the time without host updates that is worth the change


def host_updated(
    parameters: Collection[int], after: PlannedStep | None, *, released: bool, device: int = 0
) -> frozenset[int] | None:
    """Return the addresses of the parameters to update on the host.

    The choice has the shortest estimated step time: the default policy's estimate for the step
    without the states of these updates, plus the cost of `umem.page_optimizer`.

    Args:
        parameters: the addresses of the optimizer's parameters.
        after: the step of the previous call, which is not considered again.
        released: whether gradients leave in the backward pass instead of the optimizer's step.
        device: the number of the parameters' device.

    Returns:
        None until a step other than `after` that updates one of the parameters is planned.
    """
    planned = session.planned_step(device)
    if planned is None or planned is after:
        return None
    return choose(planned, parameters, measured_rate, released=released)


def choose(
    planned: PlannedStep,
    parameters: Collection[int],
    host_bytes_per_us: Callable[[], float],
    *,
    released: bool,
) -> frozenset[int] | None:
    """Return the addresses of the parameters that the host updates in this step.

    None if the step updates none of `parameters`.
    """
    from ..recompute.planner.host_updates import SHARES, Candidates, candidates

    def address(update: Update) -> int:
        return int(planned.addresses[update.pairs[0][0]])

    every = candidates(planned.trace).updates
    mine = tuple(update for update in every if address(update) in parameters)
    if not mine:
        return None
    device = replace(planned.device, host_bytes_per_us=host_bytes_per_us())
    found = Candidates(planned.trace, mine)
    times = {
        share: _estimate_us(found, share, device, planned.budget, released=released)
        for share in SHARES
    }
    best = min(SHARES, key=lambda share: (times[share], share))
    chosen = found.first(best) if times[best] < _BETTER * times[0.0] else ()
    return frozenset(map(address, chosen))


def _estimate_us(
    found: Candidates, share: float, device: DeviceProfile, budget: int, *, released: bool
) -> float:
    """Return the step's time in µs, without recomputation.

    Gradients and parameters leave in the optimizer's step or in the backward pass; parameters
    return in the optimizer's step. On devices that hide transfers, copies out, updates and copies
    back overlap.
    """
    from ..policies.default.planner import Auto
    from ..recompute.planner.host_updates import host_us, on_host

    chosen = found.first(share)
    plain = replace(on_host(found.step, chosen, device), updates=None)
    us = Auto().estimate_us(plain, device, budget)
    size = sum(int(found.step.bytes[p]) for update in chosen for p, _ in update.pairs)
    out, back = 2 * size / device.bytes_per_us_out, size / device.bytes_per_us_in
    work = sum(sum(host_us(found.step, update, device)) for update in chosen)
    if not device.hides_transfers:
        # Device and host share the memory whose bandwidth limits an update.
        return us + out + back + found.step.compute_us - plain.compute_us
    if released:
        backward = _backward_us(found.step, chosen)
        out, work = max(out - backward, 0.0), max(work - backward, 0.0)
    return us + max(out, work, back)


def _backward_us(step: StepTrace, chosen: tuple[Update, ...]) -> float:
    """Return the time in µs from the first complete gradient to the optimizer's first update."""
    made = [int(step.first[gradient]) for update in chosen for _, gradient in update.pairs]
    used = [min(update.ops) for update in chosen]
    return float(step.begin_us[min(used)] - step.begin_us[min(made)]) if made else 0.0


@functools.cache
def measured_rate() -> float:
    """Return the bytes per µs that torch's fused Adam reads and writes on this host.

    The first call in a process measures it, which takes some tenths of a second.

    Raises:
        NotSupportedError: torch is missing.
    """
    require_torch()
    import torch

    with _host_memory():
        rows = [
            torch.ones(_MEASURED_BYTES // 4, dtype=torch.float32, device="cpu") for _ in range(4)
        ]
        count = torch.zeros((), dtype=torch.float32, device="cpu")

    def update() -> None:
        value, gradient, mean, square = rows
        torch._fused_adam_(
            [value], [gradient], [mean], [square], [], [count], lr=0.0, beta1=0.9, beta2=0.999,
            weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    return 7 * _MEASURED_BYTES / _best_us(update)


def copy_rate() -> float:
    """Return the bytes per µs that torch copies on this host, each read and written once.

    Raises:
        NotSupportedError: torch is missing.
    """
    require_torch()
    import torch

    with _host_memory():
        one, other = (torch.ones(_MEASURED_BYTES, dtype=torch.uint8, device="cpu") for _ in "12")
    return _MEASURED_BYTES / _best_us(lambda: other.copy_(one))


def _host_memory() -> contextlib.AbstractContextManager[None]:
    return session.host_memory() if session.is_enabled() else contextlib.nullcontext()


def _best_us(call: Callable[[], object]) -> float:
    """Return the shortest of several durations of a call, in µs."""
    times = []
    for _ in range(_TRIALS + 1):  # the first warms up
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return min(times[1:])
