"""``umem demo``: train real networks out-of-core on this machine and compare with plain torch."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from umem.cli.base import Subparsers
    from umem.demo.runner import DemoPlan, DemoRow

MIN_STEPS = 3  # two of them warm up
QUICK_STEPS = 4
_DEVICES = "soft[:PROFILE] or cuda"
DEFAULT_PLOT = Path("umem-demo.png")


def add_parser(subparsers: Subparsers) -> None:
    """Add ``demo`` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="train a ResNet and a GPT with a fraction of their memory, and compare",
        description="Train a ResNet and a small GPT on real data, plain and with 1/2, 1/4 and 1/8 "
        "of the memory they need; exit code 1 if a result differs or a budget is exceeded.",
    )
    parser.add_argument(
        "--workload", choices=("all", "resnet", "gpt"), default="all", help="default: all"
    )
    parser.add_argument("--steps", type=int, help="training steps per run, 3 or more (default: 7)")
    parser.add_argument("--quick", action="store_true", help="4 steps, lru at 1/4 only")
    parser.add_argument("--device", default="soft", help=f"{_DEVICES} (default: soft)")
    text = "a folder on a disk for evicted memory in the runs below the peak (docs/disk.md)"
    parser.add_argument("--disk", metavar="DIR", help=text)
    text = (
        "where runs below the peak update parameters: device, host, auto or 50%% "
        "(docs/optimizer_state.md); all runs then use torch's fused kernels"
    )
    parser.add_argument("--optimizer", metavar="WHERE", help=text)
    parser.add_argument("--plot", type=Path, help=f"file of the picture (default: {DEFAULT_PLOT})")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE.html",
        help="also write a page about a step of each workload, which trains once more for it",
    )
    parser.add_argument(
        "--json", action="store_true", help="print only JSON; draw a picture only with --plot"
    )


def main(args: argparse.Namespace) -> int:
    """Run the demo; return 0 if every run was identical and within its budget, else 1.

    Raises:
        UmemError: the demo cannot run here, or an option is wrong.
    """
    plan = _plan(args)
    picture: Path | None = args.plot or (None if args.json else DEFAULT_PLOT)
    _check(plan, picture, args.report)
    with contextlib.ExitStack() as stack:
        traces = None  # a folder for the runs that the report is about
        if args.report is not None:
            folder = tempfile.TemporaryDirectory(prefix="umem-demo-")
            traces = Path(stack.enter_context(folder))
        rows = _run(plan, traces, sys.stderr if args.json else sys.stdout)
        bad = sum(not row.good for row in rows)
        from umem.demo import table

        # Before the files, which may fail.
        print(_as_json(plan, rows, picture) if args.json else f"\n{table.render(rows)}", flush=True)
        if picture is not None:
            from umem.demo import plot

            plot.draw(rows, picture)
        if traces is not None:
            _write_report(plan, rows, traces, args.report)
    if not args.json:
        _print(rows, picture, args.report, bad)
    return 1 if bad else 0


def _as_json(plan: DemoPlan, rows: Sequence[DemoRow], picture: Path | None) -> str:
    found = {
        "good": all(row.good for row in rows),
        "plan": dataclasses.asdict(plan),
        "rows": [row.as_dict() for row in rows],
        "plot": str(picture) if picture else None,
    }
    return json.dumps(found, indent=1)


def _run(plan: DemoPlan, traces: Path | None, stream: TextIO) -> list[DemoRow]:
    """Run the demo with a line per run, and a bar of all steps on a terminal."""
    from umem.base.progress import progress
    from umem.demo import runner, table

    def tell(text: str) -> None:
        print(text, file=stream, flush=True)

    rows: list[DemoRow] = []
    with progress("umem demo", plan.runs * plan.steps, between=False) as advance:
        for row in runner.run(plan, lambda text: tell(f"    {text}"), advance, traces):
            rows.append(row)
            tell(f"[{len(rows)}/{plan.runs}] {table.brief(row)}")
    return rows


def _print(rows: Sequence[DemoRow], picture: Path | None, report: Path | None, bad: int) -> None:
    print(f"Resident bytes over time: {picture}")
    if report is not None:
        print(f"Report of a step of each workload: {report}")
    if bad:
        what = "failed, differ from plain torch or went over budget"
        print(f"{bad} of {len(rows)} runs {what}.")
    else:
        print(f"All {len(rows)} runs are bit-identical to plain torch and in budget.")


def _plan(args: argparse.Namespace) -> DemoPlan:
    from umem.config import settings
    from umem.demo.runner import FRACTIONS, POLICIES, DemoPlan
    from umem.demo.workloads import WORKLOADS
    from umem.errors import ConfigError

    usual = QUICK_STEPS if args.quick else DemoPlan().steps
    steps = usual if args.steps is None else args.steps
    if steps < MIN_STEPS:
        raise ConfigError(f"--steps {steps}: the first two warm up; allowed: at least {MIN_STEPS}")
    return DemoPlan(
        workloads=tuple(WORKLOADS) if args.workload == "all" else (args.workload,),
        fractions=(4,) if args.quick else FRACTIONS,
        policies=("lru",) if args.quick else POLICIES,
        steps=steps,
        device=args.device,
        optimizer=args.optimizer,
        disk=args.disk,
        # The workers do not get umem's variables, so that plain torch stays plain.
        torch_ext_cache=str(settings.load().torch_ext_cache),
    )


def _check(plan: DemoPlan, picture: Path | None, report: Path | None) -> None:
    """Check options that would otherwise fail after minutes."""
    from umem.config import settings
    from umem.demo import data, plot
    from umem.demo.runner import AMPLE_BYTES
    from umem.session import resolve

    data.need("torch")
    given = {"device": plan.device, "budget": AMPLE_BYTES, "optimizer": plan.optimizer}
    given["disk"] = plan.disk
    chosen = settings.load(given, flags=True)
    if chosen.device.bytes is not None:
        raise chosen.refusal("device", "the demo chooses the device's size", _DEVICES)
    resolve.native_options(chosen, threads=1)
    if plan.disk is not None:  # else the runs have none, whatever UMEM_DISK says
        resolve.check_disk(chosen)
    if picture is not None:
        plot.check(picture)
    if report is not None:
        from umem.report import page

        page.check(report, "--report")
    if "resnet" in plan.workloads:
        data.need("sklearn")  # last, as its import takes seconds


def _write_report(plan: DemoPlan, rows: Sequence[DemoRow], traces: Path, path: Path) -> None:
    """Write a page of the traces that the demo recorded.

    Raises:
        UmemError: a trace cannot be read or replayed, or the page cannot be written.
    """
    from umem.demo import table
    from umem.demo.runner import trace_of
    from umem.errors import StateError
    from umem.report import page

    from . import report

    contents = []
    for name in plan.workloads:
        mine = [row for row in rows if row.workload == name]
        row, trace = mine[-1], trace_of(traces, name)
        if not os.path.exists(trace):
            raise StateError(f"no report: the run of {name} that it is about failed")
        title = f"umem demo: {name}, {row.policy}, 1/{row.fraction} of its peak"
        assert row.budget_bytes is not None, "the last row of a workload has the least budget"
        content = report.of_trace(trace, row.budget_bytes, row.policy, title=title)
        contents.append(dataclasses.replace(content, measured=table.columns(mine)))
    page.write(path, contents)
