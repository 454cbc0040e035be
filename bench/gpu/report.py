"""All parts' records as one report: JSON, markdown, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness import Report, Result, table

from gpu import pictures, software
from gpu.config import Config
from gpu.parts import BY_NAME
from gpu.record import DONE, Record
from umem.errors import NotSupportedError

Rows = Sequence[tuple[str, ...]]


def write(
    records: Sequence[Record], facts: Mapping[str, Any], config: Config, folder: Path
) -> list[Path]:
    """Write the files; returns their paths."""
    report = build(records, facts, config)
    try:
        drawn = pictures.draw(records, folder, report.file_stem)
        report.details["pictures"] = [path.name for path in drawn]
    except NotSupportedError:
        drawn = []
        report.details["no_pictures"] = "matplotlib is not installed (pip install '.[demo]')"
    report.sections = sections(records, report)
    return [*report.write(folder), *drawn]


def build(records: Sequence[Record], facts: Mapping[str, Any], config: Config) -> Report:
    """Return the report without its pictures."""
    report = Report("gpu", _settings(config))
    report.machine.update(facts)
    for record in records:
        report.results += _shown(record.results, bool(facts.get("software")))
        report.details[record.part] = record.as_dict()
    return report


def _shown(results: Sequence[Result], on_software: bool) -> list[Result]:
    """On the software driver no figure meets a target, or misses it."""
    if not on_software:
        return list(results)
    return [replace(result, target=None, note="software driver") for result in results]


def _settings(config: Config) -> dict[str, Any]:
    return {key: value for key, value in asdict(config).items() if not isinstance(value, dict)}


def sections(records: Sequence[Record], report: Report) -> list[str]:
    """Return the report's text next to its figures, as markdown lines."""
    lines: list[str] = []
    if report.machine.get("software"):
        lines += [
            f"**Figures {software.NOT_COMPARABLE}, and its time is the CPU's.** This run shows "
            "only that the bench works.",
            "",
        ]
    lines += ["## What follows", ""]
    lines += table(("item", "question", "outcome"), _decisions(records))
    lines += ["## Parts", ""]
    lines += table(("part", "status", "seconds", "errors"), _statuses(records))
    missing = [
        f"- {label}: {why}"
        for record in records
        for label, why in record.details.get("not_measured", {}).items()
    ]
    lines += [*missing, ""] if missing else []
    if "no_pictures" in report.details:
        lines += [f"No pictures: {report.details['no_pictures']}", ""]
    for name in report.details.get("pictures", ()):
        lines += [f"![{name}]({name})", ""]
    return [*lines, "## Figures", ""]


def _decisions(records: Sequence[Record]) -> Rows:
    return [
        (decision.item, decision.question, _cell(decision.outcome))
        for record in records
        for decision in record.decisions
    ]


def _statuses(records: Sequence[Record]) -> Rows:
    return [
        (
            f"{record.part}: {BY_NAME[record.part].title}",
            record.status if record.status == DONE else f"**{record.status}**",
            f"{record.seconds:.0f}",
            _cell("; ".join(f"{number}: {error}" for number, error in record.errors.items()))
            or "-",
        )
        for record in records
    ]


def _cell(text: str) -> str:
    """Text that cannot break out of a table."""
    return text.replace("|", "/").replace("\n", " ")
