"""The answer of ``umem estimate`` as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..base.units import format_bytes

if TYPE_CHECKING:
    from ..analysis.batch_size import Fit
    from ..analysis.formulas import Config, MemoryEstimate

_WIDTH = 16  # width of the first column
# Notes for each kind, in the order of the answer; the first three are the states.
_STATES = ("params", "grads", "optimizer")
_OTHERS = {
    "inputs": "",
    "activations": "kept for backward",
    "temp": "used once",
    "workspace": "of libraries",
    "fragmentation": "allocated but unused",
}


class EstimateAnswer(NamedTuple):
    """The answer of ``umem estimate``."""

    program: str | None  # None for a configuration
    config: Config | None
    batch: int | None  # None for the program's own batch
    peak: str | None  # the op at the peak
    found: MemoryEstimate
    budget: int | None
    fit: Fit | None


def render(outcome: EstimateAnswer) -> str:
    """Format the whole answer."""
    return "\n".join([*_about(outcome), *_kinds(outcome), *_budget(outcome)])


def _about(outcome: EstimateAnswer) -> Iterator[str]:
    config = outcome.config
    if config is None:
        batch = "" if outcome.batch is None else f", batch {outcome.batch}"
        yield _row("program", f"{outcome.program}{batch}")
        yield _row("peak", f"at {outcome.peak}")
        return
    yield _row("config", f"{config.optimizer}, {config.precision} precision, batch {config.batch}")
    if config.sequence is not None:
        yield _row("", "activations by formula: 12 elements per token, layer and hidden unit;")
        yield _row("", "what a program keeps: umem estimate FILE.py:function")
    if config.checkpointing != "none":
        yield _row("", f"checkpoints ({config.checkpointing}): about 33% more time, to recompute")


def _kinds(outcome: EstimateAnswer) -> Iterator[str]:
    found = outcome.found
    yield _row("states", _size(found.states))
    for name in _STATES:
        yield _row(f"  {name}", _size(getattr(found, name)))
    for name, meaning in _OTHERS.items():
        size = getattr(found, name)
        if size:
            yield _row(name, _size(size) + (f", {meaning}" if meaning else ""))
    yield _row("total", _size(found.total))


def _budget(outcome: EstimateAnswer) -> Iterator[str]:
    if outcome.budget is None:
        return
    needs = outcome.found.total
    fits = "fits" if needs <= outcome.budget else f"{outcome.budget / needs:.0%} of the total"
    yield _row("budget", f"{format_bytes(outcome.budget)}: {fits}")
    fit = outcome.fit
    if fit is None:
        return
    if fit.batch == 0:
        yield _row("max batch", f"none: not even a batch of {min(fit.needs)} fits")
        return
    needs = fit.needs[fit.batch]
    more = f", and each sample {_size(round(fit.sample))}" if fit.sample else ""
    yield _row("max batch", f"{fit.batch}, which needs {format_bytes(needs)}{more}")
    how = "tensor by tensor" if fit.modelled else "by the line through two totals"
    larger = next((batch for batch in fit.needs if batch > fit.batch), None)  # ascending
    end = "no larger one is tried" if larger is None else f"{larger} does not fit"
    yield _row("", f"predicted {how}: {fit.predicted}; traced: {fit.batch} fits, {end}")


def _size(count: int) -> str:
    """Format a size in decimal units, as in data sheets and papers, and in binary units."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit} ({format_bytes(count)})"
    return f"{count} B"


def _row(name: str, text: str) -> str:
    return f"{name:<{_WIDTH}}{text}"
