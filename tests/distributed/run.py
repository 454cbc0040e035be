"""Run trials and print a table: each without umem, with room for all, and with a part of the peak.

    make test-distributed TRIALS='--trial ddp --trial fsdp2 --budget 1/4'

A trial's peak is that of live bytes, of the rank with the most, where the budget is large. "Equal"
means the bits of all final parameters and of every loss, on all ranks. Figures are of the
iterations from the fifth on: hits are the share of ops that followed a plan; moved bytes, faults
and steps are of one rank and iteration; CPU is the median time of an iteration over plain's.

`--bounds` compares bytes with bounds that no schedule of moves is below (docs/bounds.md), in and
both ways, from the tenth iteration of 18 on; "-" where one op needs more than the budget. At a
quarter that takes more blocks than two: `--blocks 8`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import model, trial
from .compositions import TRIALS

_MIB = 1 << 20
_LARGE = 4 << 30
_STEPS = 18  # with bounds
_COLUMNS = (
    ("trial", 21), ("budget", 7), ("policy", 7), ("MiB", 6), ("equal", 6), ("hits", 6),
    ("plans", 6), ("whole", 6), ("steps", 6), ("in MiB", 8), ("out MiB", 8), ("faults", 7),
    ("above", 6), ("cpu ms", 7), ("ratio", 6), ("/bound", 7), ("both", 6),
)  # fmt: skip


def main() -> int:
    arguments = _arguments()
    names = arguments.trial or list(TRIALS)
    unknown = sorted(set(names) - set(TRIALS))
    if unknown:
        sys.stderr.write(f"unknown: {', '.join(unknown)}; known: {', '.join(TRIALS)}\n")
        return 2
    if arguments.blocks is not None:
        model.BLOCKS = arguments.blocks
    print("".join(f"{title:>{width}}" for title, width in _COLUMNS))
    failed, rows = False, []
    for name in names:
        if missing := TRIALS[name].missing:
            print(f"{name:>21}  not run: {', '.join(missing)} is not installed")
            failed |= arguments.trial is not None
            continue
        results: list[dict[str, Any]] = []
        for result, row in _of_trial(name, arguments):
            results.append(result.as_json())
            rows.append(row)
            failed |= row["equal"] != "yes"
            print(_line(row), flush=True)
            if result.error:
                print(result.error)
        if arguments.json is not None:
            with Path(arguments.json).open("a") as file:
                for figures in results:
                    file.write(json.dumps(figures) + "\n")
    return int(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trial", action="append", help=f"one of: {', '.join(TRIALS)}")
    parser.add_argument(
        "--budget", action="append", choices=("big", "1/2", "1/4"), help="all by default"
    )
    parser.add_argument("--policy", action="append", help="auto by default; may be given again")
    parser.add_argument("--blocks", type=int, help=f"of the network ({model.BLOCKS} by default)")
    parser.add_argument("--bounds", action="store_true", help="of bytes; needs umem[bounds]")
    parser.add_argument("--json", metavar="FILE", help="append every run's figures, one a line")
    parser.add_argument("--log", default="warning", help="umem's option")
    return parser.parse_args()


def _of_trial(
    name: str, arguments: argparse.Namespace
) -> Iterator[tuple[trial.Result, dict[str, Any]]]:
    steps = _STEPS if arguments.bounds else trial.STEPS
    course = trial.Course(steps=steps, bounds=arguments.bounds)
    options: dict[str, Any] = {"log": arguments.log, "course": course}
    plain = trial.run(name, "plain", course=course)
    if plain.error:
        yield plain, _row(plain, plain, 0)
        return
    asked = arguments.budget or ["big", "1/2", "1/4"]
    policies = arguments.policy or ["auto"]
    large = trial.run(name, "big", bytes_of_budget=_LARGE, **options)
    if "big" in asked or large.error:
        yield large, _row(large, plain, _LARGE)
    for budget in asked:
        if budget == "big" or large.error:
            continue
        count = large.peak_live_bytes // int(budget[2:]) // _MIB * _MIB
        for policy in policies:
            result = trial.run(name, budget, policy, bytes_of_budget=count, **options)
            yield result, _row(result, plain, count)


def _row(result: trial.Result, plain: trial.Result, budget: int) -> dict[str, Any]:
    equal = "fails" if result.error else "yes" if result.bits == plain.bits else "NO"
    shares = [
        sum(plan > 0 for plan in rank.complete[trial.FIRST :]) / len(rank.complete[trial.FIRST :])
        for rank in result.ranks
        if rank.complete[trial.FIRST :]
    ]
    share, over = result.hit_share, result.over_bound
    return {
        "trial": result.trial,
        "budget": result.budget,
        "policy": result.policy,
        "MiB": f"{(budget if result.budget != 'big' else result.peak_live_bytes) / _MIB:.0f}",
        "equal": equal,
        "hits": "-" if share is None else f"{share:.0%}",
        "plans": max((rank.plans for rank in result.ranks), default=0),
        "whole": "-" if not shares else f"{min(shares):.0%}",
        "steps": "-" if result.error or result.budget == "plain" else f"{result.each('steps'):.1f}",
        "in MiB": f"{result.each('bytes_in') / _MIB:.1f}" if not result.error else "-",
        "out MiB": f"{result.each('bytes_out') / _MIB:.1f}" if not result.error else "-",
        "faults": f"{result.each('faults'):.1f}" if not result.error else "-",
        "above": f"{result.each('ops_above_budget'):.1f}" if not result.error else "-",
        "cpu ms": f"{1e3 * result.cpu_s:.0f}",
        "ratio": f"{result.cpu_s / plain.cpu_s:.2f}" if plain.cpu_s and not result.error else "-",
        "/bound": "-" if over is None else f"{over[0]:.2f}",
        "both": "-" if over is None else f"{over[1]:.2f}",
    }


def _line(row: dict[str, Any]) -> str:
    return "".join(f"{row[title]!s:>{width}}" for title, width in _COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
