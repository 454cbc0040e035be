"""`umem.simulate`: a training step under a policy, on the engine, in virtual time."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias

from ..base import device_profiles, nodes
from ..base.device_profiles import DeviceProfile
from ..config.parsers import parse_budget
from ..errors import ConfigError, kind_of
from ..policies import registry
from ..policies.base import PlanFunction, Policy
from ..trace.step_trace import StepTrace
from . import replay
from .replay import REPEATS, Result

Source: TypeAlias = "StepTrace | str | os.PathLike[str] | Callable[[], object]"


def simulate(
    step: Source,
    policy: Policy | PlanFunction | str = registry.DEFAULT,
    *,
    device: DeviceProfile | str = device_profiles.DEFAULT,
    budget: int | str = "50%",
    repeats: int = REPEATS,
) -> Result:
    """Repeat one training step under a policy until it is steady, and return its figures.

    The engine is the one that runs programs, on a software device without memory, so that figures
    are the same on every machine. Needs no GPU; only a program needs torch.

    Args:
        step: a recorded step; the path of a trace file, whose last step counts; or a program, as a
            function that returns `(model, optimizer, batch, loss_fn)` (docs/planning.md), which is
            run on tensors without data and timed by the device's roofline.
        policy: a name, module:attribute, file.py:attribute, a policy, or a function
            `plan(trace, device, budget)`.
        device: a device profile or its name; or a node's, as "h200x8", for one of its devices while
            all of them are busy and share its links.
        budget: bytes, as 2147483648 or "2GiB", or a percentage of the step's peak, as "50%". It is
            raised to the minimum at which policies compare; `Result.raised_from` tells so.
        repeats: steps at most, 1 and up.

    Raises:
        ConfigError: no such policy or device, a malformed budget, or the policy returned None.
        PlanError: the program cannot be run on tensors without data, or trains a model that exists
            already, or the policy returned something that is no `Plan`, or one that is refused
            (docs/policies.md).
        TraceError: the file is no valid trace.
        StateError: umem is on in this process, or another simulation runs.
    """
    profile = nodes.find_device(device) if isinstance(device, str) else device
    trace = recorded_step(step, profile)
    return replay.replay_step(trace, policy, profile, _bytes(budget, trace), repeats=repeats)


def recorded_step(source: Source, device: DeviceProfile | str) -> StepTrace:
    """Return a step in columns, as policies read it.

    Args:
        source: as `step` of `simulate`.
        device: the profile, or its name or a node's, whose roofline times the ops of a program.

    Raises:
        ConfigError: there is no such device, or the profile has no figures of compute.
        PlanError: the program cannot be run on tensors without data, or trains a model that exists
            already.
        TraceError: the file is no valid trace.
    """
    if isinstance(source, StepTrace):
        return source
    if isinstance(source, (str, os.PathLike)):
        return replay.load(source).step
    if not callable(source):
        raise ConfigError(
            f"step={source!r} is {kind_of(source)}; allowed: a StepTrace, the path of a "
            "trace file, or a function that returns (model, optimizer, batch, loss_fn)"
        )
    from ..capture import program, roofline
    from ..trace.step_builder import last_step

    profile = nodes.find_device(device) if isinstance(device, str) else device
    recording = program.trace(source, device=profile, apart=True)
    return last_step(recording.device_events(roofline.clock(profile)))


def _bytes(budget: int | str, trace: StepTrace) -> int:
    try:
        asked = parse_budget(str(budget))
    except ValueError as error:
        raise ConfigError(f"budget={budget!r}: {error}; allowed: bytes as 2GiB, or 50%") from None
    if asked.percent is not None:
        return int(trace.peak_bytes * asked.percent / 100)
    if asked.bytes is None:
        raise ConfigError(
            f"budget={budget!r}: a simulation has no free memory to follow; allowed: bytes as "
            "2GiB, or a percentage of the step's peak such as 50%"
        )
    return asked.bytes
