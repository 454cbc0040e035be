"""Every policy on real networks, in virtual time: ``python bench/policies/run.py [--smoke]``.

Writes policies_<hardware>_<date>.{json,md} and pictures to bench/results. Figures of virtual time
are the same on every machine; only planning times and events a second are this machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # not this folder: its modules are a package's

from facts import version_facts  # noqa: E402
from harness import Report, Result, Spread, add_outputs, cases, note, results_folder  # noqa: E402

from policies import pictures, report, study, summary  # noqa: E402
from policies.study import Grid, Row  # noqa: E402
from policies.workloads import WORKLOADS  # noqa: E402
from umem.base import device_profiles  # noqa: E402
from umem.base.progress import over  # noqa: E402
from umem.policies import registry  # noqa: E402

FRACTIONS = ("3/4", "1/2", "1/3", "1/4")
REFERENCES = ("auto", "lru", "belady")  # on the devices that do not get all policies
SMOKE_POLICIES = ("auto", "none", "lru", "conv_lru", "belady")
WORK = HERE.parents[1] / "build" / "bench-policies"


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    grid = _grid(args)
    args.work.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    rows = _all_rows(args.workload, grid, args)
    page = _report(rows, grid, args, time.monotonic() - begin)
    print(page.markdown())
    if args.folder is not None:
        paths = [*page.write(args.folder)]
        paths += pictures.draw(rows, report.MAIN, args.folder, page.file_stem)
        print("\n".join(map(str, paths)))
    return int(any("error" in row for row in rows))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/policies/run.py", description=__doc__)
    names = list(WORKLOADS)
    parser.add_argument(
        "--workload", nargs="+", choices=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--policy", nargs="+", help="only these")
    parser.add_argument("--device", nargs="+", help="only these")
    parser.add_argument("--full", action="store_true", help="all policies on all devices")
    add_outputs(parser)
    parser.add_argument("--resume", action="store_true", help="only workloads that are not done")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, default=WORK, help="traces and parts (build/)")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: allowed: 1 and up")
    for option, known in (("policy", registry.names()), ("device", device_profiles.names())):
        for name in getattr(args, option) or ():
            if name not in known:
                parser.error(f"--{option} {name}: allowed: {', '.join(known)}")
    args.folder = results_folder(parser, args)
    args.workload = args.workload or [w.name for w in WORKLOADS.values() if w.smoke == args.smoke]
    return args


def _grid(args: argparse.Namespace) -> Grid:
    everything = tuple(args.policy or (SMOKE_POLICIES if args.smoke else registry.names()))
    some = everything if args.full else tuple(n for n in everything if n in REFERENCES)
    names = args.device or ((report.MAIN,) if args.smoke else device_profiles.names())
    main_first = sorted(names, key=lambda name: name != report.MAIN)
    chosen = {name: everything if name == report.MAIN else some for name in main_first}
    return Grid(("1/2", "1/4") if args.smoke else FRACTIONS, chosen)


def _all_rows(names: Sequence[str], grid: Grid, args: argparse.Namespace) -> list[Row]:
    """Yield the results in the order of the names, whichever is done first."""
    found: dict[str, list[Row]] = {}
    if args.resume:
        found = {name: part for name in names if (part := _part(name, grid, args.work)) is not None}
    left = [name for name in names if name not in found]
    for name in found:
        note(f"{name}: done before")
    if args.jobs == 1 or len(left) == 1:
        with cases(len(left)) as advance:
            for name in over(left, advance):
                found[name] = _one(name, grid, args.work)
    else:
        with ProcessPoolExecutor(min(args.jobs, max(len(left), 1))) as pool:
            waiting = [pool.submit(partial(_one, name, grid, args.work)) for name in left]
            with cases(len(left)) as advance:
                for future in over(as_completed(waiting), advance):
                    part = future.result()
                    found[part[0]["workload"]] = part
                    note(f"{len(found)} of {len(names)} workloads done")
    return [row for name in names for row in found[name]]


def _one(name: str, grid: Grid, work: Path) -> list[Row]:
    """One workload, in whichever process; its rows are kept for --resume."""
    from policies.traces import Traces

    begin = time.monotonic()
    rows: list[Row] = []
    where = ""
    for row in study.rows(name, Traces(name, work).on, grid):
        rows.append(row)
        if where != (where := f"{row['device']}, {row['fraction']}"):
            note(f"{name}: {where} ({time.monotonic() - begin:.0f} s)")
    kept = {"commit": version_facts()["commit"], "grid": asdict(grid), "rows": rows}
    path = work / f"{name}.json"
    path.with_suffix(".part").write_text(json.dumps(kept), encoding="utf-8")
    path.with_suffix(".part").rename(path)
    return rows


def _part(name: str, grid: Grid, work: Path) -> list[Row] | None:
    """Return the rows of an earlier run of this grid at this commit; None if there is none."""
    try:
        kept = json.loads((work / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    rows: list[Row] = kept["rows"]
    same = kept.get("commit") == version_facts()["commit"]
    return rows if same and kept["grid"] == json.loads(json.dumps(asdict(grid))) else None


def _report(rows: list[Row], grid: Grid, args: argparse.Namespace, seconds: float) -> Report:
    config = {
        "workloads": ", ".join(args.workload),
        "budgets": ", ".join(grid.fractions),
        **{f"policies on {name}": ", ".join(policies) for name, policies in grid.devices.items()},
        "seconds": round(seconds),
    }
    page = Report("policies", config)
    page.details = summary.of(rows)
    stored = summary.rows(page.details)  # the stored results suffice to remake the page
    page.sections = report.sections(stored)
    page.details["targets"] = [asdict(target) for target in report.targets(_good(stored))]
    for policy in dict.fromkeys(row["policy"] for row in _good(rows)):
        times = [row["plan_ms"] for row in _good(rows) if row["policy"] == policy]
        page.results.append(Result(f"{policy}: planning a step", Spread.of(times), "ms"))
    rates = [row["events_per_s"] / 1e6 for row in _good(rows)]
    if rates:
        page.results.append(Result("replay", Spread.of(rates), "million events/s"))
    return page


def _good(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "error" not in row]


if __name__ == "__main__":
    raise SystemExit(main())
