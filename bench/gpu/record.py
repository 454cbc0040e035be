"""Results of one part of the bench, in a JSON file that is written after every item."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness import Result, Spread

from gpu.deadline import Deadline
from gpu.raw import CallError

LACKING = (500, 801)  # CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_SUPPORTED: of an older driver
DONE, FAILED, RUNNING = "done", "failed", "running"
TIME_USED_UP = "the part's time was used up"


@dataclass(frozen=True)
class Decision:
    """A conclusion from the figures, in words."""

    item: str
    question: str
    outcome: str


@dataclass
class Record:
    """The outcome of one part. `errors` has the items that failed, by their number.

    `about` says what was measured: `machine` and `versions`, as a report has them.
    """

    part: str
    path: Path | None = None
    about: dict[str, Any] = field(default_factory=dict)
    status: str = RUNNING
    seconds: float = 0.0
    results: list[Result] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def add(
        self,
        name: str,
        values: Sequence[float],
        unit: str,
        *,
        target: float | None = None,
        note: str = "",
    ) -> Spread:
        """Keep a figure: its median and quartiles go to the results, all values to the details."""
        spread = Spread.of(values)
        self.results.append(Result(name, spread, unit, target, note))
        self.details.setdefault("values", {})[name] = list(values)
        return spread

    @property
    def origin(self) -> tuple[object, ...]:
        """The device, the commit and the mode: records that agree in them belong together."""
        machine, versions = self.about.get("machine", {}), self.about.get("versions", {})
        return machine.get("gpu"), versions.get("commit"), machine.get("smoke")

    def leave_out(self, label: str, why: str) -> None:
        """Keep that something was not measured, and why."""
        self.details.setdefault("not_measured", {})[label] = why

    def decide(self, item: str, question: str, outcome: str) -> None:
        """Keep what a rule says about the figures."""
        self.decisions.append(Decision(item, question, outcome))

    def save(self) -> None:
        """Write the file whole or not at all."""
        if self.path is None:
            return
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        draft.replace(self.path)

    def as_dict(self) -> dict[str, Any]:
        """Return the record for JSON."""
        fields = {**asdict(self)}
        del fields["path"]
        return fields


@dataclass(frozen=True)
class Item:
    """One measurement: its number in the list of questions, and what takes it."""

    number: str
    question: str
    measure: Callable[[], None]


def take(record: Record, items: Sequence[Item], deadline: Deadline) -> None:
    """Take every item; one that fails is written down and does not stop the rest."""
    for item in items:
        if deadline.passed:
            record.leave_out(item.number, TIME_USED_UP)
            record.decide(item.number, item.question, f"not measured: {TIME_USED_UP}")
        else:
            _take_one(record, item)
        record.save()


def _take_one(record: Record, item: Item) -> None:
    try:
        item.measure()
    except CallError as error:
        if error.code not in LACKING:
            _keep_error(record, item, error)
        else:
            record.decide(item.number, item.question, f"this driver cannot: {error}")
    except Exception as error:  # noqa: BLE001  (whatever it is: the next item may work)
        _keep_error(record, item, error)


def _keep_error(record: Record, item: Item, error: Exception) -> None:
    """Record `error`, which is being handled."""
    record.errors[item.number] = f"{type(error).__name__}: {error}"
    record.details.setdefault("tracebacks", {})[item.number] = traceback.format_exc()
    record.decide(item.number, item.question, "failed: see the errors of its part")


def load(path: Path) -> Record | None:
    """Read the record in a file; None if there is none that can be read."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        results = [Result.load(result) for result in fields.pop("results")]
        decisions = [Decision(**decision) for decision in fields.pop("decisions")]
        return Record(path=path, results=results, decisions=decisions, **fields)
    except (OSError, ValueError, KeyError, TypeError):
        return None
