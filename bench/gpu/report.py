"""All parts' records as one report: JSON, markdown, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from harness import Report, Result, table

from gpu import pictures, software
from gpu.config import SMOKE, Config
from gpu.parts import BY_NAME, LETTERS, PARTS
from gpu.record import DONE, TIME_USED_UP, Record
from umem.errors import NotSupportedError

Rows = Sequence[tuple[str, ...]]
HEADER = ("letter", "measures", "outcome")


def write(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write the files; returns their paths."""
    report = build(records)
    try:
        drawn = pictures.draw(records, folder, report.file_stem)
        report.details["pictures"] = [path.name for path in drawn]
    except NotSupportedError:
        drawn = []
        report.details["no_pictures"] = "matplotlib is not installed (pip install '.[demo]')"
    report.sections = sections(records, report)
    return [*report.write(folder), *drawn]


def build(records: Sequence[Record]) -> Report:
    """Return the report without its pictures. Records of one run have the same origin."""
    about = records[0].about
    machine = dict(about["machine"])
    config = asdict(SMOKE if machine["smoke"] else Config())
    report = Report("gpu", config, machine=machine, versions=about["versions"], date=about["date"])
    for record in records:
        report.results += _shown(record.results, bool(machine.get("software")))
        fields = record.as_dict()
        del fields["about"]  # the report's own machine and versions
        report.details[record.part] = fields
    return report


def summary(records: Sequence[Record]) -> Rows:
    """Return one row for each letter: what it measures, and whether it ran."""
    found = {record.part: record for record in records}
    return [
        (letter, title, _outcome([part.name for part in PARTS if part.letter == letter], found))
        for letter, title in LETTERS.items()
    ]


def _outcome(names: Sequence[str], found: Mapping[str, Record]) -> str:
    """Return `ran`, or why not all of the parts did."""
    present = [found[name] for name in names if name in found]
    if not present:
        return "not run"
    failed = [
        f"{record.part}: {_errors(record) or 'it was interrupted'}"
        for record in present
        if record.status != DONE
    ]
    missing = [name for name in names if name not in found]
    words = [f"failed: {'; '.join(failed)}"] if failed else []
    words += [f"not run: {', '.join(missing)}"] if missing else []
    cut = sum(
        why == TIME_USED_UP
        for record in present
        for why in record.details.get("not_measured", {}).values()
    )
    words += [f"{cut} not measured: {TIME_USED_UP}"] if cut else []
    return "; ".join(words) or "ran"


def _shown(results: Sequence[Result], on_software: bool) -> list[Result]:
    """On the software driver no figure meets a target, or misses it."""
    if not on_software:
        return list(results)
    return [replace(result, target=None, note="software driver") for result in results]


def sections(records: Sequence[Record], report: Report) -> list[str]:
    """Return the report's text next to its figures, as markdown lines."""
    lines: list[str] = []
    if report.machine.get("software"):
        lines += [
            f"**Figures {software.NOT_COMPARABLE}, and its time is the CPU's.** This run shows "
            "only that the bench works.",
            "",
        ]
    lines += [*table(HEADER, summary(records)), "## What follows", ""]
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
            _errors(record) or "-",
        )
        for record in records
    ]


def _errors(record: Record) -> str:
    return _cell("; ".join(f"{number}: {error}" for number, error in record.errors.items()))


def _cell(text: str) -> str:
    """Text that cannot break out of a table."""
    return text.replace("|", "/").replace("\n", " ")
