"""Memory of a program with a variable batch, measured on tensors without data."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..base import device_profiles
from ..errors import ConfigError, PlanError
from .program import folder_kept

if TYPE_CHECKING:
    from ..analysis.batch_size import TensorLines
    from ..analysis.formulas import MemoryEstimate
    from ..capture.recording import Recording
    from ..trace.step_trace import Ints, StepTrace


class Seen(NamedTuple):
    """Memory of a step."""

    found: MemoryEstimate
    peak: str  # the op at the peak of tensors
    step: StepTrace
    asked: Ints  # [m] requested bytes of each tensor


def look(recording: Recording, workspace: int) -> Seen:
    """Return the memory of a recorded step in umem's arena, with `workspace` bytes added."""
    from ..analysis import step_memory, summary
    from ..capture import roofline
    from ..simulation import replay
    from ..trace.step_builder import last_step

    device = _device()
    step = last_step(recording.device_events(roofline.clock(device)))
    resident = replay.resident_budget(step, device)
    found = step_memory.of_step(step, recording, resident, workspace)
    place = summary.place(step, recording, int(step.live_bytes.argmax()))
    return Seen(found, str(place), step, step_memory.requested_bytes(step, recording))


class Program:
    """A user's function that takes `batch`.

    Raises:
        ConfigError: no such function, or it takes no `batch`.
        PlanError: its module raises.
    """

    def __init__(self, text: str, directory: Path, workspace: int) -> None:
        from ..capture import program

        self._make: Callable[..., object] = program.find(text, directory)
        self._workspace = workspace
        self._known: dict[int, Seen] = {}
        taken = _parameters(self._make)
        if not _takes_batch(taken):
            names = ", ".join(map(str, taken)) or "nothing"
            raise ConfigError(
                f"{text!r} takes {names}; --batch and --max-batch call it as function(batch=N): "
                "give it a parameter named batch"
            )

    @folder_kept()
    def at(self, batch: int) -> Seen:
        """Return the step at a batch; each is traced once.

        Raises:
            PlanError: the program cannot be run without data at this batch.
        """
        from ..capture import program

        if batch not in self._known:
            try:
                recording = program.trace(functools.partial(self._make, batch=batch))
            except PlanError as error:
                raise PlanError(f"with batch={batch}: {error}") from error
            self._known[batch] = look(recording, self._workspace)
        return self._known[batch]

    def lines(self, first: int, second: int) -> TensorLines | None:
        """Return a model for all batches from two of them; None if their steps differ."""
        from ..analysis.batch_size import tensor_lines
        from ..simulation import replay

        return tensor_lines(
            self.at,
            (first, second),
            lambda step: replay.resident_budget(step, _device()) + self._workspace,
        )


def _device() -> device_profiles.DeviceProfile:
    """Return any device profile: the link is not used if nothing moves."""
    return device_profiles.find(device_profiles.DEFAULT)


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        return [*inspect.signature(function).parameters.values()]
    except ValueError:  # native code may have no signature
        return []


def _takes_batch(parameters: list[inspect.Parameter]) -> bool:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(
        (parameter.name == "batch" and parameter.kind in by_name)
        or parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in parameters
    )
