"""Reports: replays, comparisons, findings and the page's content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..base.device_profiles import DeviceProfile
from ..base.progress import progress
from ..base.units import format_bytes
from ..policies import registry
from ..simulation import replay
from ..simulation.replay import Result
from ..trace.ids import BlockId
from ..trace.step_trace import StepTrace
from . import causes, findings, timeline
from .page import Content

COMPARED = ("auto", "belady", "conv_lru", "lru")
_STAGED = (
    "Pages on their way to and from the disk take {} of the option `budget`. Findings name the "
    "whole option, and all else what is left of it."
)
COMPARED_OPS = 100_000  # beyond this, comparing unrequested policies takes minutes


def content(
    step: StepTrace,
    device: DeviceProfile,
    budget: int,
    *,
    title: str,
    policy: str = registry.DEFAULT,
    compared: Sequence[str] | None = None,
    origins: Mapping[BlockId, str] | None = None,
    host_budget: int = 0,
    staging: int = 0,
    notes: Sequence[str] = (),
    results: Sequence[Result] = (),
    show: bool = False,
) -> Content:
    """Replay a step under a policy, and return the content of its page.

    Args:
        step: the step that is repeated.
        device: the link and the cost of faults.
        budget: bytes on the device, raised to the least at which policies compare.
        title: what ran.
        policy: the name of the policy that is shown.
        compared: names of the policies in the table; None: `COMPARED`, for steps of up to
            `COMPARED_OPS` operators.
        origins: the source lines that allocate blocks, as far as known.
        host_budget: bytes that evicted tensors may take; 0 for no limit.
        staging: bytes that a disk's transfers take of the option `budget` beside `budget`.
        notes: sentences for the end of the page.
        results: existing replays of this step with this device and budget.
        show: draw the progress where standard error is a terminal.

    Raises:
        ConfigError, PlanError, OutOfMemoryError, StateError: as `replay.replay_step`.
    """
    trials = findings.Trials(step, device, host_budget, staged=staging > 0)
    if compared is None:
        compared = COMPARED if step.n_ops <= COMPARED_OPS else ()
        if not compared:
            trials.left_out.append(
                f"other policies: for steps of up to {COMPARED_OPS:,} operators; --compare "
                "names some"
            )
    names = [name for name in dict.fromkeys(compared) if name != policy]
    parts = 1 + len(names) + findings.parts(step)
    with progress("making the report", parts, quiet=not show) as advance:
        logged = replay.replay_logged(step, policy, device, budget, host_budget=host_budget)
        advance(1)
        line = timeline.of(step, device, logged)
        for known in (*results, logged.result):
            trials.add(known)
        trials.advance = advance
        others = [trials.run(name, budget) for name in names]
        results = sorted(
            (logged.result, *(one for one in others if one is not None)),
            key=lambda one: one.step_us,
        )
        by_cause, waits = causes.bytes_by_cause(line), causes.waits(line)
        found = findings.find(line, waits, by_cause, trials, results)
    said = [f"Not tried: {text}." for text in trials.left_out]
    if staging:
        said.insert(0, _STAGED.format(format_bytes(staging)))
    if raised := replay.raised_note(logged.result):
        said.insert(0, f"{raised}.")
    return Content(title, line, by_cause, waits, found, results, origins or {}, (*notes, *said))
