"""What every bench shares: interleaved rounds, medians, the machine, and the report.

A ratio is only worth something between figures of one run: machines drift. So the candidates take
turns, each round gives one ratio, and the report has the median and the quartiles of those.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from facts import machine_facts, version_facts


@dataclass(frozen=True)
class Spread:
    """A sample's median and quartiles."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value or more; a single one is its own quartiles."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))


@dataclass(frozen=True)
class Result:
    """One figure. `target` is the most that it should be, in the same unit; None without one."""

    name: str
    spread: Spread
    unit: str
    target: float | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.target is None else self.spread.median <= self.target


@dataclass
class Report:
    """All results of one bench run, with what is needed to read them later."""

    theme: str
    config: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    sections: list[str] = field(default_factory=list)  # markdown lines before the figures
    machine: dict[str, Any] = field(default_factory=machine_facts)
    versions: dict[str, str] = field(default_factory=version_facts)
    date: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )

    @property
    def file_stem(self) -> str:
        """``<theme>_<hardware>_<date>``."""
        words = self.machine.get("gpu") or f"{self.machine['cpu']} {self.machine['cores']}c"
        hardware = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
        return f"{self.theme}_{hardware}_{self.date[:10]}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        results = [{**asdict(result), "reached": result.reached} for result in self.results]
        fields = {**asdict(self), "results": results}
        del fields["sections"]  # they say the details in words
        return fields

    def markdown(self) -> str:
        """For people."""
        lines = [f"# Bench: {self.theme}", "", f"Date: {self.date}", ""]
        lines += table(("machine", "value"), self.machine.items())
        lines += table(("software", "version"), self.versions.items())
        lines += table(("config", "value"), self.config.items())
        lines += self.sections
        header = ("figure", "median", "quartiles", "rounds", "target", "reached", "note")
        lines += table(header, (_line(result) for result in self.results))
        return "\n".join(lines)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the JSON and the markdown file; returns both paths."""
        folder.mkdir(parents=True, exist_ok=True)
        data, text = (folder / f"{self.file_stem}.{suffix}" for suffix in ("json", "md"))
        data.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        text.write_text(self.markdown(), encoding="utf-8")
        return data, text


def interleave(
    candidates: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Call every candidate once a round, each round starting one further: the values by name."""
    names = list(candidates)
    values: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            values[name].append(candidates[name]())
    return values


def ratios(values: Sequence[float], base: Sequence[float]) -> Spread:
    """Of the quotients of equal rounds."""
    return Spread.of([value / other for value, other in zip(values, base, strict=True)])


def differences(values: Sequence[float], base: Sequence[float]) -> Spread:
    """Of the differences of equal rounds."""
    return Spread.of([value - other for value, other in zip(values, base, strict=True)])


def _line(result: Result) -> tuple[str, ...]:
    form = ".3f" if result.unit == "x" else ".1f"
    spread = result.spread
    return (
        result.name,
        f"{spread.median:{form}} {result.unit}",
        f"{spread.low:{form}} to {spread.high:{form}}",
        str(spread.count),
        "-" if result.target is None else f"<= {result.target:g} {result.unit}",
        {None: "-", True: "yes", False: "**no**"}[result.reached],
        result.note,
    )


def table(header: Sequence[str], rows: Any) -> list[str]:
    """Markdown lines, with an empty one at the end."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return [*lines, ""]
