"""``umem demo``: train real networks out-of-core on this machine and compare with plain torch."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.cli.base import Subparsers
    from umem.demo.plot import Panel
    from umem.demo.runner import DemoOutcome, DemoPlan

MIN_STEPS = 3  # two of them warm up
QUICK_STEPS = 4
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
    parser.add_argument("--device", default="soft", help="soft[:PROFILE] or cuda (default: soft)")
    text = (
        "where the runs below the peak update parameters (docs/optimizer_state.md), all runs by "
        "torch's fused kernels: device, host, auto or 50%%"
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
    traces = None  # a folder for the runs that the report is about
    with contextlib.ExitStack() as folders:
        if args.report is not None:
            traces = folders.enter_context(tempfile.TemporaryDirectory(prefix="umem-demo-"))
        return _run(args, traces)


def _run(args: argparse.Namespace, traces: str | None) -> int:
    from umem.demo import plot, progress, runner, table

    plan = _plan(args, traces)
    path = args.plot or (None if args.json else DEFAULT_PLOT)
    _check(plan, path, args.report)
    stream = sys.stderr if args.json else sys.stdout
    listener = progress.for_stream(stream, plan.runs)
    try:
        outcome = runner.run(plan, listener)
    finally:
        listener.close()
    if path is not None:
        plot.draw(_panels(outcome), path)
    if args.report is not None:
        _write_report(outcome, args.report)
    if args.json:
        print(json.dumps({**outcome.as_dict(), "plot": str(path) if path else None}, indent=1))
    else:
        print("\n" + table.render(outcome.rows))
        print(f"Resident bytes over time: {path}")
        if args.report is not None:
            print(f"Report of a step of each workload: {args.report}")
        print(_verdict(outcome))
    return 0 if outcome.good else 1


def _plan(args: argparse.Namespace, traces: str | None) -> DemoPlan:
    from umem.config import settings
    from umem.demo.runner import FRACTIONS, POLICIES, DemoPlan
    from umem.demo.workloads import WORKLOADS
    from umem.errors import ConfigError

    steps = (
        args.steps if args.steps is not None else QUICK_STEPS if args.quick else DemoPlan().steps
    )
    if steps < MIN_STEPS:
        raise ConfigError(f"--steps {steps}: the first two warm up; allowed: at least {MIN_STEPS}")
    return DemoPlan(
        workloads=tuple(WORKLOADS) if args.workload == "all" else (args.workload,),
        fractions=(4,) if args.quick else FRACTIONS,
        policies=("lru",) if args.quick else POLICIES,
        steps=steps,
        device=args.device,
        optimizer=args.optimizer,
        traces=traces,
        # The workers do not get umem's variables, so that plain torch stays plain.
        torch_ext_cache=str(settings.load().torch_ext_cache),
    )


def _check(plan: DemoPlan, path: Path | None, report: Path | None) -> None:
    """Check options that would otherwise fail after minutes."""
    from umem.config import settings
    from umem.demo import data, plot
    from umem.demo.runner import AMPLE_BYTES
    from umem.session import resolve

    data.need("torch")
    if "resnet" in plan.workloads:
        data.need("sklearn")
    if path is not None:
        plot.check(path)
    if report is not None:
        from umem.report import page

        page.check(report, "--report")
    given = {"device": plan.device, "budget": AMPLE_BYTES, "optimizer": plan.optimizer}
    resolve.native_options(settings.load(given, flags=True), threads=1)


def _write_report(outcome: DemoOutcome, path: Path) -> None:
    """Write a page of the traces that the demo recorded.

    Raises:
        UmemError: a trace cannot be read or replayed, or the page cannot be written.
    """
    from umem.demo import table
    from umem.demo.runner import trace_of
    from umem.errors import StateError
    from umem.report import page

    from . import report

    plan, contents = outcome.plan, []
    for name in plan.workloads:
        mine = [row for row in outcome.rows if row.workload == name]
        row, trace = mine[-1], Path(trace_of(plan, name))
        if not trace.exists():
            raise StateError(f"no report: the run of {name} that it is about failed")
        title = f"umem demo: {name}, {row.policy}, 1/{row.fraction} of its peak"
        measured = table.columns(mine)
        assert row.budget_bytes is not None, "the last row of a workload has the least budget"
        content = report.of_trace(trace, row.budget_bytes, row.policy, title=title)
        contents.append(dataclasses.replace(content, measured=measured))
    page.write(path, contents)


def _panels(outcome: DemoOutcome) -> list[list[Panel]]:
    from umem.demo.plot import Panel

    rows: list[list[Panel]] = []
    for name in outcome.plan.workloads:
        panels: list[Panel] = []
        for fraction in outcome.plan.fractions:
            mine = [r for r in outcome.rows if (r.workload, r.fraction) == (name, fraction)]
            samples = {r.policy: outcome.samples[name, fraction, r.policy] for r in mine}
            resident = {
                policy: [(ms, size) for ms, size, _ in points] for policy, points in samples.items()
            }
            whole = next((points for points in samples.values() if points), [])
            held = [(ms, size) for ms, _, size in whole]
            title = f"{name}, 1/{fraction} of its peak"
            panels.append(Panel(title, mine[0].budget_bytes or 0, held, resident))
        rows.append(panels)
    return rows


def _verdict(outcome: DemoOutcome) -> str:
    if outcome.good:
        return f"All {len(outcome.rows)} runs are bit-identical to plain torch and in budget."
    bad = sum(not row.good for row in outcome.rows)
    return f"{bad} of {len(outcome.rows)} runs failed, differ from plain torch or went over budget."
