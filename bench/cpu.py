"""umem on the software device against plain torch on this CPU: ``python bench/cpu.py [--smoke]``.

Writes bench/results/cpu_<hardware>_<date>.{json,md}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import (
    Report,
    Result,
    Spread,
    add_outputs,
    cases,
    differences,
    interleave,
    note,
    output_of,
    ratios,
    results_folder,
)

from umem.base.progress import Advance, over
from umem.base.units import GIB, MIB
from umem.config import settings
from umem.demo.process import RunSpec, WorkerProcess

HERE = Path(__file__).resolve().parent
AMPLE = 1 * GIB
PAGE = 2 * MIB
FITS_TARGET, QUARTER_TARGET = 1.03, 1.20  # times plain torch
MICRO = ("observer", "alloc", "fault")  # parts of micro.py
OBSERVER_TARGET_NS, ALLOC_TARGET_NS = 250.0, 150.0


@dataclass(frozen=True)
class Config:
    """Benchmark parameters and repetitions."""

    workloads: tuple[str, ...] = ("resnet", "gpt")
    fractions: tuple[int, ...] = (1, 2, 4)  # 1: everything fits
    policies: tuple[str, ...] = ("none", "lru", "conv_lru")
    warm_steps: int = 2
    steps_a_round: int = 1
    rounds: int = 9
    micro_rounds: int = 15
    threads: int = 1
    torch_ext_cache: str = field(default_factory=lambda: str(settings.load().torch_ext_cache))


SMOKE = Config(workloads=("resnet",), fractions=(1, 4), policies=("lru",), rounds=2, micro_rounds=2)


def step_times(workload: str, config: Config, report: Report, advance: Advance) -> None:
    """Add the step time ratios of one workload."""
    with contextlib.ExitStack() as stack:
        workers: dict[str, WorkerProcess] = {}

        def start(name: str, budget: int | None, policy: str = "lru") -> WorkerProcess:
            spec = RunSpec(
                workload,
                budget=budget,
                policy=policy,
                threads=config.threads,
                torch_ext_cache=config.torch_ext_cache,
            )
            workers[name] = stack.enter_context(WorkerProcess(spec, on_note=note))
            workers[name].step(config.warm_steps)
            return workers[name]

        start("plain", None)
        roomy = start(f"fits, {config.policies[0]}", AMPLE, config.policies[0])
        peak = roomy.stats()["peak_live_bytes"]
        for fraction in config.fractions:
            for policy in config.policies:
                name = _name(fraction, policy)
                if name not in workers:
                    start(name, _budget(peak, fraction), policy)
        note(f"{workload}: {config.rounds} rounds of {len(workers)} processes")
        before = {name: worker.stats() for name, worker in workers.items()}
        times = interleave(
            {name: _timed(worker, config.steps_a_round) for name, worker in workers.items()},
            config.rounds,
            advance,
        )
        after = {name: worker.stats() for name, worker in workers.items()}
        prints = {name: worker.finish()["fingerprint"] for name, worker in workers.items()}
    _add_ratios(workload, config, report, times, prints)
    report.details[workload] = {
        "peak_live_bytes": peak,
        "step_ms": times,
        "per_step": {
            name: _per_step(before[name], after[name], config.rounds * config.steps_a_round)
            for name in workers
        },
    }


def _name(fraction: int, policy: str) -> str:
    return f"fits, {policy}" if fraction == 1 else f"1/{fraction}, {policy}"


def _budget(peak: int, fraction: int) -> int:
    return AMPLE if fraction == 1 else peak // fraction // PAGE * PAGE


def _timed(worker: WorkerProcess, steps: int) -> Any:
    return lambda: statistics.median(record["ms"] for record in worker.step(steps))


def _per_step(before: dict[str, int], after: dict[str, int], steps: int) -> dict[str, float]:
    keys = ("faults", "bytes_in", "bytes_out", "bytes_discarded", "evictions", "prefetches")
    return {key: (after[key] - before[key]) / steps for key in keys if key in after}


def _add_ratios(
    workload: str,
    config: Config,
    report: Report,
    times: dict[str, list[float]],
    prints: dict[str, dict[str, str]],
) -> None:
    plain = times["plain"]
    report.results.append(Result(f"{workload}: plain torch, a step", Spread.of(plain), "ms"))
    for fraction in config.fractions:
        target = {1: FITS_TARGET, 4: QUARTER_TARGET}.get(fraction)
        for policy in config.policies:
            name = _name(fraction, policy)
            same = prints[name] == prints["plain"]
            report.results.append(
                Result(
                    f"{workload}: {name}",
                    ratios(times[name], plain),
                    "x",
                    target,
                    "identical" if same else "NOT IDENTICAL",
                )
            )


def micro(part: str, config: Config) -> dict[str, list[float]]:
    """Return the values of one part of micro.py.

    Raises:
        SystemExit: as `output_of`.
    """
    rounds = str(config.micro_rounds)
    note(f"{part}: {rounds} rounds")
    command = [sys.executable, str(HERE / "micro.py"), part, rounds, config.torch_ext_cache]
    found = output_of(command, env=settings.child_environment())
    values: dict[str, list[float]] = json.loads(found)
    return values


def small_costs(config: Config, report: Report, advance: Advance) -> None:
    """Add the observer's cost, the allocator's and that of a fault."""
    adds, allocs, faults = (micro(part, config) for part in over(MICRO, advance))
    report.details["micro"] = {"observer_ns": adds, "alloc_ns": allocs, "fault_us": faults}
    report.results.append(Result("1-element add, plain torch", Spread.of(adds["plain"]), "ns"))
    report.results.append(
        Result(
            "observer, an op of 2 inputs and 1 output",
            differences(adds["native"], adds["off"]),
            "ns",
            OBSERVER_TARGET_NS,
            "difference of the same add with the observer and without",
        )
    )
    for name, values in allocs.items():
        target = ALLOC_TARGET_NS if name.startswith("umem") else None
        report.results.append(Result(f"alloc and free, {name}", Spread.of(values), "ns", target))
    for name, values in faults.items():
        report.results.append(Result(f"one fault, {name}", Spread.of(values), "us"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/cpu.py", description=__doc__)
    add_outputs(parser)
    parser.add_argument("--rounds", type=int, help="rounds of the step times")
    args = parser.parse_args(argv)
    config = SMOKE if args.smoke else Config()
    if args.rounds is not None:
        if args.rounds < 1:
            parser.error(f"--rounds {args.rounds}: allowed: 1 and up")
        config = Config(**{**vars(config), "rounds": args.rounds})
    folder = results_folder(parser, args)
    stated = {k: v for k, v in vars(config).items() if k != "torch_ext_cache"}  # a private path
    report = Report("cpu", {**stated, "ample_bytes": AMPLE})
    with cases(len(config.workloads) * config.rounds + len(MICRO)) as advance:
        for workload in config.workloads:
            step_times(workload, config, report, advance)
        small_costs(config, report, advance)
    print(report.markdown())
    if folder is not None:
        print("\n".join(str(path) for path in report.write(folder)))
    same = all(result.note != "NOT IDENTICAL" for result in report.results)
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
