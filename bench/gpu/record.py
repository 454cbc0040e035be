"""The limits of a part, time and managed memory, and its results, written after each item."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness import Result, Spread

from umem.base.units import GIB, PAGE_BYTES, format_bytes

SHARE, MOST = 4, 32 * GIB  # managed bytes: at most a quarter of the free memory, at most 32 GiB
LACKING = (500, 801)  # CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_SUPPORTED: an older driver
DONE, FAILED, RUNNING = "done", "failed", "running"
TIME_USED_UP = "the part's time was used up"


class CallError(RuntimeError):
    """A driver call failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} returned CUresult {code}")
        self.code = code


class GuardError(RuntimeError):
    """An allocation of managed memory was refused."""


def limit_bytes(free: int) -> int:
    """Return the max managed bytes at a time, in whole pages, with `free` bytes free."""
    return min(free // SHARE, MOST) // PAGE_BYTES * PAGE_BYTES


class Guard:
    """The one door to managed memory, far below what the card has free.

    Real oversubscription can hang a GPU for everybody who uses it.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.held, self.peak = limit, 0, 0

    @contextlib.contextmanager
    def share(self, nbytes: int, what: str) -> Iterator[None]:
        """Reserve managed bytes for the length of a block; enter it before allocating.

        Raises:
            GuardError: they do not fit below the limit; nothing is reserved.
        """
        if not 0 < nbytes <= self.limit - self.held:
            raise GuardError(
                f"{what} needs {format_bytes(nbytes)}; allowed: {format_bytes(self.limit)} of "
                f"managed memory, {format_bytes(self.held)} of which are in use"
            )
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        try:
            yield
        finally:
            self.held -= nbytes


class Deadline:
    """A moment that measurements must not run past."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, clock() + seconds

    @property
    def left(self) -> float:
        """Seconds until then, 0 once it has passed."""
        return max(self._end - self._clock(), 0.0)

    def rounds(self, count: int) -> Iterator[int]:
        """Yield 0, 1, ... up to `count` rounds: at least one, and none that starts too late."""
        for i in range(count):
            if i and not self.left:
                return
            yield i


@dataclass
class Record:
    """The outcome of one part. `errors` has the items that failed, by name.

    `about` has the `machine`, `versions` and `date` of the report.
    """

    part: str
    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    status: str = RUNNING
    seconds: float = 0.0
    results: list[Result] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def add(
        self, name: str, values: Sequence[float], unit: str, target: float | None = None
    ) -> float:
        """Keep a figure, with all its values in the details; return its median."""
        spread = Spread.of(values)
        self.results.append(Result(name, spread, unit, target))
        self.details.setdefault("values", {})[name] = list(values)
        return spread.median

    def leave_out(self, label: str, why: str) -> None:
        """Keep that something was not measured, and why."""
        self.details.setdefault("not_measured", {})[label] = why

    def fail(self, name: str, error: Exception) -> None:
        """Keep an error that is being handled."""
        self.errors[name] = f"{type(error).__name__}: {error}"
        self.details.setdefault("tracebacks", {})[name] = traceback.format_exc()

    def save(self) -> None:
        """Write the file whole or not at all."""
        draft = self.path.with_suffix(".tmp")
        fields = {**asdict(self), "path": None}
        draft.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
        draft.replace(self.path)

    def take(self, items: Mapping[str, Callable[[], None]], deadline: Deadline) -> None:
        """Measure every item; one that fails is written down and does not stop the rest."""
        for name, measure in items.items():
            try:
                if deadline.left:
                    measure()
                else:
                    self.leave_out(name, TIME_USED_UP)
            except Exception as error:  # noqa: BLE001  (whatever it is: the next item may work)
                if isinstance(error, CallError) and error.code in LACKING:
                    self.leave_out(name, f"this driver cannot: {error}")
                else:
                    self.fail(name, error)
            self.save()


def load(path: Path) -> Record | None:
    """Read the record in a file; None if there is none that can be read."""
    try:
        fields = {**json.loads(path.read_text(encoding="utf-8")), "path": path}
        return Record(**{**fields, "results": [Result.load(one) for one in fields["results"]]})
    except (OSError, ValueError, KeyError, TypeError):
        return None
