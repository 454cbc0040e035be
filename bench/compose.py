"""Programs that use another library, with and without umem: ``python bench/compose.py``.

Each program of tests/distributed/compositions.py runs on the software device with memory for all,
which gives its peak; then without umem, and with it at half and at a quarter of that, in turn, each
time in a new process. A program whose library is missing is left out, and the report says so.
Writes compose_<hardware>_<date>.{json,md} to bench/results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import (
    Report,
    Result,
    Spread,
    add_outputs,
    cases,
    interleave,
    note,
    results_folder,
    table,
)

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests"))
from distributed import trial
from distributed.compositions import COMPOSITIONS

from umem.base.progress import Advance, ignore
from umem.base.units import GIB, MIB

Row = dict[str, Any]

SHARES = {"1/2": 2, "1/4": 4}
LEAST = 8 * MIB  # umem's least budget, for one thread
ALONE = "alone"
SMOKE = ("int8_rows",)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/compose.py", description=__doc__)
    parser.add_argument("--program", nargs="+", choices=list(COMPOSITIONS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, help="per variant, in turn")
    add_outputs(parser)
    args = parser.parse_args(argv)
    folder = results_folder(parser, args)
    course = trial.Course(trial.FIRST + 1, 1) if args.smoke else trial.Course(10, 2)
    rounds = 1 if args.smoke else args.rounds
    names = args.program or (SMOKE if args.smoke else COMPOSITIONS)
    with cases(len(names) * rounds) as advance:
        rows = [measured(name, rounds, course, advance) for name in names]
    page = report(rows, rounds, course)
    print(page.markdown())
    if folder is not None:
        print("\n".join(map(str, page.write(folder))))
    return int(any(run["bits"] is False for row in page.details["rows"] for run in row["runs"]))


def measured(name: str, rounds: int, course: trial.Course, advance: Advance = ignore) -> Row:
    """Run a program in all ways; `runs` is empty where its library is not there."""
    composition = COMPOSITIONS[name]
    missing = composition.trial.missing
    row: Row = {"name": name, "title": composition.title, "runs": [], "missing": missing}
    if missing:
        advance(rounds)
        return row
    course = course._replace(says_steps=composition.says_steps)
    note(composition.title)
    peak = _run(name, "big", GIB, course).peak_live_bytes
    budgets = {share: max(peak // by // MIB * MIB, LEAST) for share, by in SHARES.items()}
    found: dict[str, list[trial.Result]] = {way: [] for way in (ALONE, *SHARES)}

    def seconds(way: str) -> float:
        budget = budgets.get(way, 0)
        found[way].append(_run(name, way if budget else "plain", budget, course))
        return found[way][-1].cpu_s

    candidates: dict[str, Callable[[], float]] = {way: partial(seconds, way) for way in found}
    times = interleave(candidates, rounds, advance)
    plain = found[ALONE]
    row |= {"peak": peak, "seconds": times[ALONE]}
    row["versions"] = {need: metadata.version(need) for need in composition.trial.needs}
    for share, budget in budgets.items():
        runs = found[share]
        row["runs"].append(
            {
                "share": share,
                "budget": budget,
                "bits": all(run.bits == plain[0].bits for run in (*plain, *runs)),
                "resident": max(run.peak_resident_bytes for run in runs),
                "ratios": [a / b for a, b in zip(times[share], times[ALONE], strict=True)],
                "moved": runs[0].each("bytes_in") + runs[0].each("bytes_out"),
                "faults": runs[0].each("faults"),
                "above": runs[0].each("ops_above_budget"),
                "hits": min((run.hit_share or 0.0) for run in runs),
            }
        )
    return row


def _run(name: str, way: str, budget: int, course: trial.Course) -> trial.Result:
    result = trial.run(name, way, bytes_of_budget=budget, course=course, log="error")
    if result.error:
        raise SystemExit(f"{name}, {way}: {result.error}")
    return result


def report(rows: Sequence[Row], rounds: int, course: trial.Course) -> Report:
    """Return a table of all programs, and each program's time with umem over that without."""
    config = {"device": "soft", "threads": 1, "rounds": rounds, "steps": course.steps}
    page = Report("compose", config, details={"rows": list(rows)})
    for row in rows:
        page.versions |= row.get("versions", {})
    head = ("program", "alone: peak, time", "at 1/2: resident, time", "at 1/4: resident, time",
            "as planned", "bits")  # fmt: skip
    page.sections = [
        "## Programs",
        "",
        f"The first {trial.FIRST} steps do not count. Peak of live bytes alone, and of resident "
        "bytes with umem; processor time of a step, all threads, alone, and with umem over that; "
        "the least share of operators that followed a plan.",
        "",
        *table(head, map(_cells, rows)),
    ]
    page.results = [
        Result(f"{row['title']}, {run['share']}: time / alone", Spread.of(run["ratios"]), "x")
        for row in rows
        for run in row["runs"]
    ]
    return page


def _cells(row: Row) -> tuple[str, ...]:
    if row["missing"]:
        return (row["title"], f"not measured: no {', '.join(row['missing'])}", *("-",) * 4)
    runs = row["runs"]
    alone = Spread.of(row["seconds"]).median
    return (
        row["title"],
        f"{row['peak'] / MIB:.0f} MiB, {1e3 * alone:.0f} ms",
        *(
            f"{run['resident'] / MIB:.0f} MiB, {Spread.of(run['ratios']).median:.2f} x"
            for run in runs
        ),
        f"{100 * min(run['hits'] for run in runs):.0f} %",
        "equal" if all(run["bits"] for run in runs) else "**differ**",
    )


if __name__ == "__main__":
    raise SystemExit(main())
