"""Shared code of the benchmarks: interleaved rounds, medians, the machine, and the report.

A ratio is only worth something between figures of one run: machines drift. So the candidates take
turns, each round gives one ratio, and the report has the median and the quartiles of those.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from facts import RESULTS, ROOT, machine_facts, refusal, version_facts

from umem.base.progress import Advance, ignore, progress

T = TypeVar("T")
ASIDE = ROOT / "build" / "bench-results"  # for reports that may not be kept at their destination


@dataclass(frozen=True)
class Spread:
    """A sample's median and quartiles."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values; a single one is its own quartiles."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))


@dataclass(frozen=True)
class Result:
    """One figure. `target` is its upper limit in the same unit; None without one."""

    name: str
    spread: Spread
    unit: str
    target: float | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """True if the target is met; None without one."""
        return None if self.target is None else self.spread.median <= self.target

    @classmethod
    def load(cls, fields: Mapping[str, Any]) -> Result:
        """Construct from JSON; `met` follows from the rest."""
        known = {key: value for key, value in fields.items() if key != "reached"}
        return cls(**{**known, "spread": Spread(**known["spread"])})


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

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a written report without its sections."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        results = [Result.load(result) for result in fields.pop("results")]
        return cls(results=results, **fields)

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        results = [{**asdict(result), "reached": result.reached} for result in self.results]
        fields = {**asdict(self), "results": results}
        del fields["sections"]  # their details are in words
        return fields

    def markdown(self) -> str:
        """Format the report as markdown."""
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
        return write(folder, self.file_stem, self.as_dict(), self.markdown())


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that every bench has; `results_folder` reads them."""
    parser.add_argument(
        "--smoke", action="store_true", help="does it work? small, and no figures to keep"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the report (default: bench/results; for --smoke: none)"
    )


def results_folder(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Path | None:
    """Return the report's path, None for no report; call it before anything is measured.

    Ends the program with an error where a report may not be written there.
    """
    if args.out is None and args.smoke:
        return None
    folder: Path = args.out or RESULTS
    if args.smoke and folder.resolve().is_relative_to(RESULTS):
        parser.error(f"--smoke --out {folder}: its figures mean nothing; name another folder")
    if (why := refusal(folder)) is not None:
        parser.error(why)
    return folder


def write(folder: Path, stem: str, record: Any, page: str) -> tuple[Path, Path]:
    """Write a report's JSON and markdown file; returns both paths.

    Ends the program where the report may not be written there, with the files in `ASIDE` instead:
    the tree may have changed since the start.
    """
    why = refusal(folder)
    if why is not None:
        folder = ASIDE
    folder.mkdir(parents=True, exist_ok=True)
    data, text = (folder / f"{stem}.{suffix}" for suffix in ("json", "md"))
    data.write_text(_as_json(record), encoding="utf-8")
    text.write_text(page, encoding="utf-8")
    if why is not None:
        raise SystemExit(f"{why}. This one is at {text}")
    return data, text


def note(text: str) -> None:
    """Print to stderr what is measured next; this clears a bar in that line, of any process."""
    begin = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{begin}bench: {text}", file=sys.stderr, flush=True)


def cases(total: float) -> contextlib.AbstractContextManager[Advance]:
    """Show on a terminal how many cases of a bench are done, with the time left.

    It is drawn after a case, never while one is measured.
    """
    return progress("bench", total, between=False)


def output_of(command: Sequence[str], **how: Any) -> str:
    """Run a command with these options of `subprocess.run`, and return what it prints.

    Its stderr is not a terminal, where it would draw while it is measured.

    Raises:
        SystemExit: the command failed; the text has its stderr.
    """
    done = subprocess.run(command, check=False, capture_output=True, text=True, **how)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def interleave(
    candidates: Mapping[str, Callable[[], T]], rounds: int, advance: Advance = ignore
) -> dict[str, list[T]]:
    """Call every candidate once a round, each round starting one further: the values by name.

    `advance` is called with 1 after each round.
    """
    names = list(candidates)
    values: dict[str, list[T]] = {name: [] for name in names}
    for i in range(rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            values[name].append(candidates[name]())
        advance(1)
    return values


def quotient(value: float, base: float) -> float:
    """Return `value / base`; 1 if both are 0, infinity if only `base` is."""
    return value / base if base else math.inf if value else 1.0


def ratios(values: Sequence[float], base: Sequence[float]) -> Spread:
    """Return the spread of the quotients of equal rounds."""
    return Spread.of([value / other for value, other in zip(values, base, strict=True)])


def differences(values: Sequence[float], base: Sequence[float]) -> Spread:
    """Return the spread of the differences of equal rounds."""
    return Spread.of([value - other for value, other in zip(values, base, strict=True)])


def _as_json(record: Any) -> str:
    """Indented, but a list of plain values takes one line: lists of thousands are common."""

    def joined(found: re.Match[str]) -> str:
        return "[" + re.sub(r",\n *", ", ", found[1]) + "]"

    # A newline is never within a string of JSON.
    return re.sub(r"\[\n *([^][{}]*?)\n *\]", joined, json.dumps(record, indent=1)) + "\n"


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
