"""All parts' records as one report, with lower bounds, which need no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from harness import Report, Result, Spread, table

from gpu.device import software_driver
from gpu.parts import PARTS, SMOKE, Config
from gpu.record import DONE, Record
from gpu.trainings import way_of
from umem.analysis import bounds
from umem.errors import PlanError

ROOFLINE = "h200-pcie5"  # its durations of operators, scaled to the measured step
ALLOWED = 1.25  # times the lower bound, at half of the peak
FOLDER = "gpu-parts"  # of records and recorded steps
HEADER = ("letter", "part", "outcome", "seconds")
NOTHING = (
    "**This is the software driver: its figures mean nothing, and its time is the CPU's.** The run "
    "shows only that the bench works."
)


def write(records: Sequence[Record], folder: Path, with_bounds: bool) -> list[Path]:
    """Write the files of one run's records, and return their paths; they have the same origin."""
    about = records[0].about
    machine, software = dict(about["machine"]), about["machine"]["software"]
    config = asdict(SMOKE if machine["smoke"] else Config())
    report = Report("gpu", config, machine=machine, versions=about["versions"], date=about["date"])
    report.results = [result for record in records for result in record.results]
    report.details = {each.part: {**asdict(each), "about": None, "path": None} for each in records}
    if with_bounds:
        report.results += _over_bounds(records, folder)
    if software:  # no figure of it meets a target, or misses it
        report.results = [replace(result, target=None) for result in report.results]
    report.sections = [*([NOTHING, ""] if software else []), *table(HEADER, summary(records))]
    left_out = [
        (f"{record.part}, {label}", why)
        for record in records
        for label, why in record.details.get("not_measured", {}).items()
    ]
    report.sections += table(("not measured", "why"), left_out) if left_out else []
    return list(report.write(folder))


def summary(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return one row for each part: whether it ran, or why not."""
    found = {record.part: record for record in records}
    rows: list[tuple[str, ...]] = []
    for part in PARTS:
        record = found.get(part.name)
        outcome, seconds = "not run", ""
        if record is not None:
            errors = "; ".join(f"{name}: {error}" for name, error in record.errors.items())
            cell = errors.replace("|", "/").replace("\n", " ")
            outcome = "ran" if record.status == DONE else f"failed: {cell or 'interrupted'}"
            seconds = f"{record.seconds:.0f}"
        rows.append((part.letter, part.name, outcome, seconds))
    return rows


def _over_bounds(records: Sequence[Record], folder: Path) -> list[Result]:
    """Return step times over the closed-form lower bound, where the link was measured.

    A step is recorded on fake tensors, in some seconds of the CPU for each network.
    """
    link: dict[str, float] = next(
        (one.details["link"] for one in records if "link" in one.details), {}
    )
    if not {"in", "out", "pinned in", "pinned out"} <= link.keys():
        return []
    software_driver()
    from policies.traces import Traces  # imports torch

    results = []
    for record in records:
        found = record.details
        rows = [row for row in found.get("rows", ()) if "budget" in row]
        if not rows:
            continue
        profile, step = Traces(found["net"], folder / FOLDER).on(ROOFLINE)
        best = {way: 1e3 * max(link[way], link[f"pinned {way}"]) for way in ("in", "out")}
        profile = replace(profile, bytes_per_us_in=best["in"], bytes_per_us_out=best["out"])
        scaled = replace(step, op_us=step.op_us * (1e3 * found["plain_ms"] / step.compute_us))
        for row in rows:
            try:
                floor = bounds.closed_form_floor(scaled, profile, row["budget"]).us / 1e3
            except PlanError:  # an operator needs more than the budget: nothing bounds its paging
                continue
            target = ALLOWED if row["fraction"] == 1 / 2 else None
            spread = Spread.of([ms / floor for ms in row["ms"]])
            name = f"{found['net']}, {way_of(row)}: to the lower bound"
            results.append(Result(name, spread, "x", target, f"bound {floor:.0f} ms"))
    return results
