"""The tables: bytes over their bound, step over its floor, geometric means, what was aimed at.

``python bench/policies/report.py bench/results/policies_X.json [--pictures FOLDER]`` prints the
page of a stored run again, and draws its pictures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # its modules are a package's

from harness import Report, table

from policies import summary
from policies.ratios import bytes_ratio, floor_us, geomean, step_ratio
from policies.study import Row
from policies.workloads import CONVOLUTIONAL, G10, WORKLOADS
from umem.base.units import GIB

MAIN = "a100-pcie4"
MODEL = "auto"  # the policy that the targets are for


@dataclass(frozen=True)
class Target:
    """A figure and its upper limit."""

    name: str
    value: float
    most: float
    where: str = ""

    @property
    def reached(self) -> bool:
        """True if the target is met."""
        return self.value <= self.most


def sections(rows: Sequence[Row]) -> list[str]:
    """Return Markdown with all of the rows' figures."""
    good = [row for row in rows if "error" not in row]
    lines = ["## Targets", "", *_targets(targets(good))]
    lines += ["## Certificates", "", *certificates(good)]
    for device in dict.fromkeys(row["device"] for row in good):
        mine = [row for row in good if row["device"] == device]
        lines += [f"## {device}", "", *_means(mine), *_workloads(mine)]
    lines += ["## Rankings", "", *rankings(good), "## Traffic of convolutional networks", ""]
    lines += [*traffic(good), "## Peaks of live bytes", "", *_peaks(good)]
    failed = [row for row in rows if "error" in row]
    if failed:
        lines += ["## Failed", ""]
        header = ("workload", "device", "budget", "policy", "reason")
        keys = ("workload", "device", "fraction", "policy", "error")
        lines += table(header, ([row[key] for key in keys] for row in failed))
    return lines


def targets(rows: Sequence[Row]) -> list[Target]:
    """Return the targets on the main device: the planning study's, or later, narrower ones."""
    found: list[Target] = []
    for fraction, lru in (("1/2", 0.78), ("1/4", 0.83)):
        mine = _of(rows, MAIN, MODEL, fraction)
        if not mine:
            continue
        found.append(Target(f"step / floor at {fraction}, geomean", _mean(mine, step_ratio), 1.05))
        highest = max(mine, key=step_ratio)
        name = f"step / floor at {fraction}, highest"
        found.append(Target(name, step_ratio(highest), 1.15, _place(highest)))
        pairs = [(row, _twin(rows, row, "lru")) for row in mine]
        over = [row["step_us"] / twin["step_us"] for row, twin in pairs if twin]
        found.append(Target(f"step / lru's at {fraction}, geomean", geomean(over), lru))
    mine = [row for row in rows if row["device"] == MAIN and row["policy"] == MODEL]
    if mine:
        found += _worst(mine)
    return found


def _worst(mine: Sequence[Row]) -> list[Target]:
    moved = [(ratio, row) for row in mine if (ratio := bytes_ratio(row)) is not None]
    found: list[Target] = []
    if moved:
        found.append(Target("bytes in / bound, geomean", geomean(r for r, _ in moved), 1.01))
        ratio, row = max(moved, key=lambda pair: pair[0])
        found.append(Target("bytes in / bound, highest", ratio, 1.03, _place(row)))
    for size, most in ((1500, 50.0), (20_000, 1000.0)):
        times = [(row["plan_ms"], row) for row in mine if row["tensors"] <= size]
        if times:
            ms, row = max(times, key=lambda pair: pair[0])
            found.append(
                Target(f"CPU ms to plan up to {size} tensors, highest", ms, most, _place(row))
            )
    return found


def certificates(rows: Sequence[Row]) -> list[str]:
    """List steps far from the closed-form bound, with the higher bound of a linear program."""
    header = ("workload", "device", "budget", "step ms", "floor ms", "LP floor ms")
    lines = []
    for row in rows:
        if row["policy"] != MODEL or "lp_floor_us" not in row:
            continue
        times = [row[key] / 1e3 for key in ("step_us", "floor_us", "lp_floor_us")]
        ratios = (row["step_us"] / row["floor_us"], step_ratio(row))
        cells = [f"{time:.0f}" for time in times] + [f"{ratio:.2f}" for ratio in ratios]
        lines.append((row["workload"], row["device"], row["fraction"], *cells))
    text = "No schedule is faster than the LP floor, which counts the link in windows of time."
    return [text, "", *table((*header, "step / floor", "step / LP floor"), lines)]


def rankings(rows: Sequence[Row]) -> list[str]:
    """Check that demand paging is slower than `deepum`, and that than the oracle, as in G10."""
    header = ("workload", "budget", "none", "deepum", "belady", MODEL)
    lines: list[tuple[str, ...]] = []
    for row in _of(rows, MAIN, MODEL):
        if row["workload"] not in G10:
            continue
        others = [_twin(rows, row, name) for name in header[2:]]
        if any(other is None for other in others):
            continue
        ratios = [other["step_us"] / other["compute_us"] for other in others if other]
        holds = ratios[0] > ratios[1] > ratios[3] >= 1
        cells = (f"{ratio:.2f}" for ratio in ratios)
        oracle = "yes" if ratios[1] > ratios[2] else "no"
        lines.append((row["workload"], row["fraction"], *cells, _yes(holds), oracle))
    title = ("none > deepum > umem >= 1", "deepum > belady")
    return ["Step over compute; G10 (MICRO 2023) ranks them so.", "", *table(header + title, lines)]


def traffic(rows: Sequence[Row]) -> list[str]:
    """Compare GiB per step, in and out, of `conv_lru` and `distance`."""
    lines: list[tuple[str, ...]] = []
    for row in _of(rows, MAIN, "conv_lru"):
        other = _twin(rows, row, "distance")
        if row["workload"] not in CONVOLUTIONAL or other is None:
            continue
        moved = [(r["bytes_in"] + r["bytes_out"]) / GIB for r in (row, other)]
        times = [r["step_us"] / r["compute_us"] for r in (row, other)]
        cells = [f"{value:.2f}" for value in (*moved, *times)]
        lines.append((row["workload"], row["fraction"], *cells))
    header = ("workload", "budget", "conv_lru GiB", "distance GiB")
    return table((*header, "conv_lru step / compute", "distance step / compute"), lines)


def _targets(found: Sequence[Target]) -> list[str]:
    header = ("figure", "value", "target", "reached", "where")
    return table(
        header,
        (
            (t.name, f"{t.value:.3f}", f"<= {t.most:g}", _yes(t.reached), t.where or "-")
            for t in found
        ),
    )


def _yes(holds: bool) -> str:
    return "yes" if holds else "**no**"


def _means(rows: Sequence[Row]) -> list[str]:
    fractions = list(dict.fromkeys(row["fraction"].rstrip("*") for row in rows))
    header = ("policy", *(f"{fraction}" for fraction in fractions))
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = [policy]
        for fraction in fractions:
            mine = [r for r in rows if r["policy"] == policy and _share(r) == fraction]
            moved = [ratio for row in mine if (ratio := bytes_ratio(row))]
            cells.append(f"{_mean(mine, step_ratio):.3f} ({geomean(moved):.3f})")
        lines.append(cells)
    text = "Geometric means: step / floor (bytes in / bound). Raised budgets count as their share."
    return [text, "", *table(header, lines)]


def _workloads(rows: Sequence[Row]) -> list[str]:
    """One line a workload and budget: a policy a column."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row["workload"], row["fraction"]), {})[row["policy"]] = row
    lines = []
    for (workload, fraction), by_policy in groups.items():
        first = next(iter(by_policy.values()))
        about = (f"{first['budget'] / GIB:.2f}", f"{first['compute_us'] / 1e3:.0f}")
        floor = f"{floor_us(first) / 1e3:.0f}"
        cells = [_cell(by_policy.get(policy)) for policy in policies]
        lines.append((workload, fraction, *about, floor, *cells))
    header = ("workload", "budget", "GiB", "compute ms", "floor ms", *policies)
    text = (
        "Step / floor (the higher one, where there are two), bytes in / bound. `*`: raised to what "
        "the largest op needs."
    )
    return [text, "", *table(header, lines)]


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    moved = bytes_ratio(row)
    return f"{step_ratio(row):.2f}, {'-' if moved is None else f'{moved:.2f}'}"


def _peaks(rows: Sequence[Row]) -> list[str]:
    lines = []
    for name, row in {row["workload"]: row for row in rows}.items():
        study = WORKLOADS[name].study_gib
        peak = row["peak_bytes"] / GIB
        other = ("-", "-") if study is None else (f"{study}", f"{100 * (peak / study - 1):+.0f} %")
        lines.append(
            (name, WORKLOADS[name].title, f"{peak:.2f}", *other, row["ops"], row["tensors"])
        )
    header = ("workload", "what", "GiB", "planning study", "difference", "ops", "tensors")
    return table(header, lines)


def _share(row: Row) -> str:
    return str(row["fraction"]).rstrip("*")


def _place(row: Row) -> str:
    return f"{row['workload']}, {row['fraction']}"


def _mean(rows: Sequence[Row], figure: Callable[[Row], float]) -> float:
    return geomean(figure(row) for row in rows)


def _of(rows: Sequence[Row], device: str, policy: str, share: str | None = None) -> list[Row]:
    """Select the rows of a share, including the budgets that were raised from it."""
    return [
        row
        for row in rows
        if (row["device"], row["policy"]) == (device, policy) and share in (None, _share(row))
    ]


def _twin(rows: Sequence[Row], row: Row, policy: str) -> dict[str, Any] | None:
    """Return the same replay under another policy."""
    keys = ("workload", "device", "fraction")
    return next(
        (r for r in rows if r["policy"] == policy and all(r[key] == row[key] for key in keys)),
        None,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/policies/report.py", description=__doc__)
    parser.add_argument("record", type=Path, help="the JSON file of a run")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw them there, too")
    args = parser.parse_args(argv)
    page = Report.load(args.record)
    rows = summary.rows(page.details)
    page.sections = sections(rows)
    print(page.markdown(), end="")
    if args.pictures is not None:
        from policies import pictures

        pictures.draw(rows, MAIN, args.pictures, page.file_stem)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
