"""A program whose batch can be chosen, looked at on tensors without data."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .. import devices
from ..errors import ConfigError, PlanError

if TYPE_CHECKING:
    from ..plan.batch_fit import TensorLines
    from ..plan.memory_model import Estimate
    from ..plan.recording import Recording
    from ..trace.step import Ints, StepTrace


class Seen(NamedTuple):
    """A step's memory."""

    found: Estimate
    peak: str  # the op at the peak of tensors
    step: StepTrace
    asked: Ints  # [m] bytes of each tensor as asked for


def look(recording: Recording, workspace: int) -> Seen:
    """What a recorded step takes in umem's arena, and `workspace` bytes on top."""
    from .. import replay
    from ..plan import analysis, roofline, step_estimate
    from ..trace.steps import last_step

    device = _device()
    step = last_step(recording.events(roofline.clock(device)))
    resident = replay.resident_budget(step, device)
    found = step_estimate.of_step(step, recording, resident, workspace)
    place = analysis.place(step, recording, int(step.live_bytes.argmax()))
    return Seen(found, str(place), step, step_estimate.asked_bytes(step, recording))


class Program:
    """A function of the user's that takes `batch`.

    Raises:
        ConfigError: there is no such function, or it takes no `batch`.
        PlanError: its module raises.
    """

    def __init__(self, text: str, directory: Path, workspace: int) -> None:
        from ..plan import entry

        self._make: Callable[..., object] = entry.find(text, directory)
        self._workspace = workspace
        self._known: dict[int, Seen] = {}
        taken = _parameters(self._make)
        if not _takes_batch(taken):
            names = ", ".join(map(str, taken)) or "nothing"
            raise ConfigError(
                f"{text!r} takes {names}; --batch and --max-batch call it as function(batch=N): "
                "give it a parameter named batch"
            )

    def at(self, batch: int) -> Seen:
        """The step at a batch; traced once.

        Raises:
            PlanError: the program cannot be run without data at this batch.
        """
        from ..plan import tracer

        if batch not in self._known:
            try:
                recording = tracer.trace(functools.partial(self._make, batch=batch))
            except PlanError as error:
                raise PlanError(f"with batch={batch}: {error}") from error
            self._known[batch] = look(recording, self._workspace)
        return self._known[batch]

    def lines(self, first: int, second: int) -> TensorLines | None:
        """A model of all batches by two; None where these have different steps."""
        from .. import replay
        from ..plan.batch_fit import Sized, TensorLines, alike

        one, other = self.at(first), self.at(second)
        if not alike(one.step, other.step):
            return None
        return TensorLines(
            Sized(first, one.step, one.asked),
            Sized(second, other.step, other.asked),
            lambda step: replay.resident_budget(step, _device()) + self._workspace,
        )


def _device() -> devices.DeviceProfile:
    """Any: its link is not used where nothing moves."""
    return devices.find(devices.DEFAULT)


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        return [*inspect.signature(function).parameters.values()]
    except ValueError:  # of native code, which does not say
        return []


def _takes_batch(parameters: list[inspect.Parameter]) -> bool:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(
        (parameter.name == "batch" and parameter.kind in by_name)
        or parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in parameters
    )
