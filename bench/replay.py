"""Replay speed: a synthetic training step on the runtime, in virtual time.

``python bench/replay.py [--smoke]`` writes bench/results/replay_<hardware>_<date>.{json,md}.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from dataclasses import asdict, dataclass

import numpy as np
from harness import Report, Result, Spread, add_outputs, cases, note, results_folder, table

from umem import _core
from umem.base.progress import over
from umem.base.units import MIB

PAGE = 2 * MIB
TARGET_NS = 1000.0  # per event: a million of them a second
PERSISTENT, TRANSIENT = 0, 1


@dataclass(frozen=True)
class Config:
    """The replayed step, and the repetitions."""

    events: int = 10_000_000
    parts: int = 10  # each one gives a value
    layers: int = 100
    profile: str = "h200-pcie5"


SMOKE = Config(events=100_000, parts=2)


@dataclass(frozen=True)
class Case:
    """A policy at a share of the peak of live bytes."""

    policy: str
    share: float

    @property
    def name(self) -> str:
        """Name of the case in the report."""
        return f"{self.policy}, {'no shortage' if self.share > 1 else f'{self.share:g} of peak'}"


CASES = (Case("lru", 2.0), Case("none", 0.5), Case("lru", 0.5), Case("conv_lru", 0.5))


class Step:
    """A training step: weights, activations kept until the backward pass, gradients, scratch."""

    def __init__(self, layers: int) -> None:
        self.bytes: list[int] = []
        self.first: list[int] = []
        self.last: list[int] = []
        self.ops: list[tuple[float, list[int], list[int]]] = []
        activations = [16 * MIB, 8 * MIB, 300 * 1024, 64 * MIB, 5 * MIB]
        self.weights = [self._tensor(4 * MIB, 0) for _ in range(layers)]
        kept: list[int] = []
        for layer in range(layers):
            scratch = self._tensor(1000)
            kept.append(self._tensor(activations[layer % 5]))
            self._op(153.25, [self.weights[layer], *kept[-2:-1]], [kept[-1], scratch])
        gradient = kept[-1]
        for layer in reversed(range(layers)):
            grown = self._tensor(activations[layer % 5])
            self._op(306.5, [self.weights[layer], kept[layer], gradient], [grown])
            gradient = grown
        for weight in self.weights:
            self._op(20.5, [weight], [weight])

    def _tensor(self, nbytes: int, first: int | None = None) -> int:
        self.bytes.append(nbytes)
        self.first.append(len(self.ops) if first is None else first)
        self.last.append(len(self.ops))
        return len(self.bytes) - 1

    def _op(self, us: float, reads: list[int], writes: list[int]) -> None:
        for tensor in (*reads, *writes):
            self.last[tensor] = len(self.ops)
        self.ops.append((us, reads, writes))

    @property
    def peak(self) -> int:
        """Peak of live bytes."""
        change = np.zeros(len(self.ops) + 1, np.int64)
        for tensor, nbytes in enumerate(self.bytes):
            first, last = self.first[tensor], self.last[tensor]
            persistent = tensor in self.weights
            change[0 if persistent else first] += nbytes
            change[-1 if persistent else last + 1] -= nbytes
        return int(np.cumsum(change).max())

    def columns(self) -> dict[str, object]:
        """Return the columns for `Replay.set_step`."""
        n, m = len(self.ops), len(self.bytes)
        kind = np.full(m, TRANSIENT, np.int64)
        kind[self.weights] = PERSISTENT
        accesses = [[*reads, *writes] for _, reads, writes in self.ops]
        start = np.zeros(n + 1, np.int64)
        start[1:] = np.cumsum([len(tensors) for tensors in accesses])
        writes = [
            [t in w for t in tensors] for tensors, (_, _, w) in zip(accesses, self.ops, strict=True)
        ]
        return {
            "op_us": np.array([us for us, _, _ in self.ops]),
            "bytes": np.array(self.bytes, np.int64),
            "large": np.array(self.bytes) >= PAGE,
            "tag": ["param" if t in self.weights else "activation" for t in range(m)],
            "family": ["conv"] * m,
            "kind": kind,
            "first": np.array(self.first, np.int64),
            "last": np.array(self.last, np.int64),
            "next_alias": np.full(m, -1, np.int64),
            "access_start": start,
            "access_tensor": np.array([t for tensors in accesses for t in tensors], np.int64),
            "access_write": np.array([w for row in writes for w in row]),
        }


def options(case: Case, config: Config, peak: int) -> _core.Options:
    """Return the options of a replay."""
    made = _core.Options()
    made.profile = config.profile
    made.policy = case.policy
    made.budget_bytes = int(peak * case.share)
    made.floor_bytes = 4 * PAGE
    made.min_swap_bytes = PAGE
    return made


@dataclass
class Timing:
    """Times of one replay: nanoseconds per event in each of its parts."""

    cpu_ns: list[float]
    wall_ns: list[float]  # more on a machine that has other work, too


def replayed(case: Case, step: Step, config: Config) -> tuple[Timing, dict[str, float]]:
    """Repeat the step's columns; return the times of the native calls and the last figures."""
    replay = _core.Replay(options(case, config, step.peak))
    timing = Timing([], [])
    try:
        replay.set_step(step.columns())
        replay.run_step(1)
        repeats = max(int(config.events / replay.figures()["events"] / config.parts), 1)
        for _ in range(config.parts):
            before = replay.figures()
            start = time.thread_time()
            replay.run_step(repeats)
            cpu_ns = (time.thread_time() - start) * 1e9
            after = replay.figures()
            events = after["events"] - before["events"]
            timing.cpu_ns.append(cpu_ns / events)
            timing.wall_ns.append((after["seconds"] - before["seconds"]) * 1e9 / events)
        return timing, replay.figures()
    finally:
        replay.close()


def measure(config: Config) -> Report:
    """Replay every case."""
    step = Step(config.layers)
    report = Report("replay", asdict(config))
    load = os.getloadavg()[0]
    rows = []
    with cases(len(CASES)) as advance:
        for case in over(CASES, advance):
            note(case.name)
            timing, figures = replayed(case, step, config)
            rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            spread = Spread.of(timing.cpu_ns)
            report.results.append(
                Result(f"{case.name}: an event", spread, "ns", TARGET_NS, "processor time")
            )
            report.details[case.name] = {
                **asdict(timing),
                "last_step": figures,
                "peak_rss_bytes": rss,
            }
            wall = Spread.of(timing.wall_ns).median
            rows.append(
                (case.name, f"{figures['events']:,.0f}", f"{1e3 / spread.median:.2f}",
                 f"{1e3 / wall:.2f}", f"{rss / MIB:.0f} MiB")
            )  # fmt: skip
    header = ("case", "events", "M events/s of processor time", "M events/s", "peak RSS")
    report.sections += [f"Load of the machine at the start: {load:.1f}.", "", *table(header, rows)]
    report.details["load_average"] = load
    report.details["peak_live_bytes"] = step.peak
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/replay.py", description=__doc__)
    add_outputs(parser)
    args = parser.parse_args(argv)
    folder = results_folder(parser, args)
    report = measure(SMOKE if args.smoke else Config())
    print(report.markdown())
    if folder is not None:
        print("\n".join(str(path) for path in report.write(folder)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
