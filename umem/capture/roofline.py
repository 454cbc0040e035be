"""The durations of ops on a device, without the device.

An op takes the longer of its operations at the device's peak and its bytes at the rate of the
device's memory (roofline: Williams, Waterman, Patterson, CACM 2009), and a fixed cost. Peaks are
the vendor's; real kernels reach a part of them, so a real step takes longer, and hides
transfers more easily, than according to the roofline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from ..base.device_profiles import Compute, DeviceProfile
from ..errors import ConfigError
from ..trace.schema import Event, Op
from .recording import Clock, OpCost


def clock(device: DeviceProfile) -> Clock:
    """Return the roofline of a device.

    Raises:
        ConfigError: the profile has no figures of compute.
    """
    compute = device.compute
    if compute is None:
        raise ConfigError(
            f"the device profile {device.name!r} has no table `compute`, so op times are "
            "unknown; add the table (docs/planning.md), or take a built-in profile with --link"
        )
    peaks = _peaks(compute)

    def duration(_op: Op, cost: OpCost) -> float:
        of_flops = cost.flops / peaks[cost.precision]
        return max(of_flops, cost.bytes / compute.bytes_per_us) + compute.launch_us

    return duration


def scaled(base: Clock, ops: Iterable[tuple[Op, OpCost]], recorded: Iterable[Event]) -> Clock:
    """Scale `base` to a recorded run.

    The factor of an op name is its median duration there divided by its median in `base`. Shapes
    need not agree: ops of a name keep their proportions. Names missing in the run get the factor
    of all ops together.

    Raises:
        ConfigError: no op of the run has a time, or none has a name of `ops`.
    """
    planned = _by_name((op.name, base(op, cost)) for op, cost in ops)
    run = _by_name(
        (event.name, event.us)
        for event in recorded
        if isinstance(event, Op) and event.us is not None
    )
    common = planned.keys() & run.keys()
    if not common:
        raise ConfigError(
            "the recorded run times none of the planned ops; allowed: a trace of the same program "
            "whose ops have `us`"
        )
    factors = {name: run[name] / planned[name] for name in common if planned[name]}
    rest = sum(run[name] for name in common) / (sum(planned[name] for name in common) or 1.0)
    return lambda op, cost: base(op, cost) * factors.get(op.name, rest)


def _peaks(compute: Compute) -> Mapping[str, float]:
    return {
        "half": compute.half_flops_per_us,
        "tf32": compute.tf32_flops_per_us,
        "fp32": compute.fp32_flops_per_us,
        "fp64": compute.fp64_flops_per_us,
    }


def _by_name(durations: Iterable[tuple[str, float]]) -> dict[str, float]:
    lists: dict[str, list[float]] = {}
    for name, duration in durations:
        lists.setdefault(name, []).append(duration)
    return {name: median(values) for name, values in lists.items()}
