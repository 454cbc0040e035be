"""Bytes that umem moves in engines of distributed training: ``python bench/engines.py [--smoke]``.

The network of tests/distributed trains on two ranks of gloo at a quarter of the peak of live bytes.
The bytes moved by settled steps are compared with the bounds of offline paging (docs/bounds.md), in
which the segments of small tensors move as a whole. Writes
bench/results/engines_<hardware>_<date>.{json,md}.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from typing import Any

from facts import ROOT
from harness import Report, Result, Spread, add_outputs, cases, note, results_folder, table

sys.path.insert(0, str(ROOT / "tests"))

from distributed import model, trial
from distributed.programs import TRIALS

from umem.base.progress import over
from umem.base.units import MIB, PAGE_BYTES

ENGINES = (
    "plain", "ddp", "ddp_view", "fsdp1", "fsdp2", "zero1", "zero2", "zero3",
    "zero1_groups", "zero2_groups",
)  # fmt: skip
TARGET = 1.2
AMPLE = 8 << 30
LOOK = 3  # iterations that have the peak


@dataclass(frozen=True)
class Config:
    """Benchmark parameters and repetitions."""

    blocks: int = 8  # enough that the largest op needs less than half of the budget
    steps: int = trial.SETTLED + 4
    rounds: int = 2
    fraction: int = 4  # budget, as a share of the peak


SMOKE = Config(blocks=2, steps=trial.SETTLED + 1, rounds=1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/engines.py", description=__doc__)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, metavar="NAME", default=ENGINES)
    add_outputs(parser)
    args = parser.parse_args(argv)
    folder = results_folder(parser, args)
    config = SMOKE if args.smoke else Config()
    report = Report("engines", asdict(config))
    measure(args.engine, config, report)
    print(report.markdown())
    if folder is not None:
        print("\n".join(map(str, report.write(folder))))
    return int(any(row["bits"] is False for row in report.details["rows"]))


def measure(engines: list[str], config: Config, report: Report) -> None:
    """Add the rows of all engines, which take turns in each round."""
    model.BLOCKS = config.blocks
    chosen, notes = [], []
    for name in engines:
        if missing := TRIALS[name].missing:
            notes.append(f"{name} was not run: {', '.join(missing)} is not installed.")
        else:
            chosen.append(name)
    rows: list[dict[str, Any]] = []
    with cases((2 + config.rounds) * len(chosen)) as advance:
        plain = {name: _run(name, "plain", config, config.steps) for name in over(chosen, advance)}
        peaks = {
            name: _run(name, "big", config, LOOK, AMPLE).peak_live_bytes
            for name in over(chosen, advance)
        }
        for _ in range(config.rounds):
            for name in over(chosen, advance):
                budget = peaks[name] // config.fraction // PAGE_BYTES * PAGE_BYTES
                found = _run(name, f"1/{config.fraction}", config, config.steps, budget)
                rows.append(_row(found, budget, bits=found.bits == plain[name].bits))
    report.details["rows"] = rows
    report.sections = _lines(rows, config, notes)
    for name in chosen:
        ratios = [row["both"] for row in rows if row["engine"] == name and row["both"] is not None]
        if ratios:
            what = f"bytes moved, {name}"
            report.results.append(Result(what, Spread.of(ratios), "x the bound", TARGET))


def _run(name: str, budget: str, config: Config, steps: int, count: int = 0) -> trial.Result:
    note(f"{name}, {budget}")
    bounds = budget == f"1/{config.fraction}"
    course = trial.Course(steps=steps, bounds=bounds)
    found = trial.run(name, budget, bytes_of_budget=count, course=course)
    if found.error:
        raise SystemExit(f"{name} at {budget} failed:\n{found.error}")
    return found


def _row(found: trial.Result, budget: int, *, bits: bool) -> dict[str, Any]:
    over = found.over_bound
    return {
        "engine": found.trial,
        "budget": budget,
        "bits": bits,
        "hits": found.hit_share,
        "in": found.each("bytes_in", first=trial.SETTLED),
        "out": found.each("bytes_out", first=trial.SETTLED),
        "faults": found.each("faults", first=trial.SETTLED),
        "bound_in": [rank.bound_bytes_in for rank in found.ranks],
        "bound_moved": [rank.bound_bytes_moved for rank in found.ranks],
        "over_in": None if over is None else over[0],
        "both": None if over is None else over[1],
    }


def _lines(rows: list[dict[str, Any]], config: Config, notes: list[str]) -> list[str]:
    header = (
        "engine", "budget MiB", "bits", "hits", "MiB in", "/ bound", "MiB out", "both / bound",
        "faults",
    )  # fmt: skip
    text = (
        f"Figures are those of one rank and step. Steps before {trial.SETTLED} do not count: they "
        f"try a plan and its spare one. {config.blocks} blocks of width {model.WIDTH}, float32, "
        "AdamW. The bounds are of the recorded step, in and both ways; '-' where one op needs more "
        "than the budget."
    )
    return [text, "", *table(header, map(_cells, rows)), *(f"{note}\n" for note in notes)]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return (
        row["engine"],
        f"{row['budget'] / MIB:.0f}",
        "equal" if row["bits"] else "NOT equal",
        "-" if row["hits"] is None else f"{row['hits']:.0%}",
        f"{row['in'] / MIB:.1f}",
        ratio(row["over_in"]),
        f"{row['out'] / MIB:.1f}",
        ratio(row["both"]),
        f"{row['faults']:.1f}",
    )


if __name__ == "__main__":
    sys.exit(main())
