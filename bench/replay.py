"""Replay speed: a synthetic training trace on the runtime in virtual time, made as it is read.

``python bench/replay.py [--smoke]`` writes bench/results/replay_<hardware>_<date>.{json,md}.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

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
    """The replayed traces, and the repetitions."""

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

    def header(self) -> bytes:
        """Yield the first line and the weights."""
        lines = ['{"kind":"umem-trace","v":1,"device":"","source":"bench/replay.py","note":""}']
        for weight in self.weights:
            lines.append(
                f'{{"e":"alloc","id":{weight},"bytes":{self.bytes[weight]},"tag":"param"}}'
            )
        return "".join(f"{line}\n" for line in lines).encode()

    def text(self) -> Callable[[int], bytes]:
        """Yield the step's lines; the ids of its allocations start at `base`."""
        persistent = len(self.weights)  # the first tensors
        begins: list[list[int]] = [[] for _ in self.ops]
        ends: list[list[int]] = [[] for _ in self.ops]
        for tensor in range(persistent, len(self.bytes)):
            begins[self.first[tensor]].append(tensor)
            ends[self.last[tensor]].append(tensor)

        def lines(base: int) -> bytes:
            name = [*range(persistent), *range(base, base + len(self.bytes) - persistent)]
            out: list[str] = []
            for i, (us, reads, writes) in enumerate(self.ops):
                for tensor in begins[i]:
                    out.append(
                        f'{{"e":"alloc","id":{name[tensor]},"bytes":{self.bytes[tensor]},'
                        '"tag":"activation","family":"conv"}\n'
                    )
                r = ",".join([str(name[tensor]) for tensor in reads])
                w = ",".join([str(name[tensor]) for tensor in writes])
                out.append(
                    f'{{"e":"op","i":{i},"name":"aten::convolution","r":[{r}],"w":[{w}],"us":{us}}}\n'
                )
                for tensor in ends[i]:
                    out.append(f'{{"e":"free","id":{name[tensor]}}}\n')
            out.append('{"e":"step"}\n')
            return "".join(out).encode()

        return lines

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
            "tag": ["param" if t in self.weights else "activation" for t in range(m)],
            "family": ["conv"] * m,
            "kind": kind,
            "first": np.array(self.first, np.int64),
            "last": np.array(self.last, np.int64),
            "next_alias": np.full(m, -1, np.int64),
            "source": np.arange(m, dtype=np.int64),
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


def timed(replay: _core.Replay, parts: int, play: Callable[[], None]) -> Timing:
    """`play` in parts; the time is that of its native calls."""
    result = Timing([], [])
    for _ in range(parts):
        before = replay.figures()
        cpu = CPU.total
        play()
        after = replay.figures()
        events = after["events"] - before["events"]
        result.cpu_ns.append((CPU.total - cpu) * 1e9 / events)
        result.wall_ns.append((after["seconds"] - before["seconds"]) * 1e9 / events)
    return result


class CPU:
    """The processor time of native calls."""

    total = 0.0

    @classmethod
    def count(cls, call: Callable[[], None]) -> None:
        """Make the call."""
        start = time.thread_time()
        call()
        cls.total += time.thread_time() - start


def with_parsing(case: Case, step: Step, config: Config) -> tuple[Timing, dict[str, float]]:
    """Return the whole trace as text."""
    lines = step.text()
    a_step = lines(0).count(b"\n")
    steps = max(config.events // a_step // config.parts, 1)
    replay = _core.Replay(options(case, config, step.peak))
    base = len(step.bytes)

    def play() -> None:
        nonlocal base
        for _ in range(steps):
            text = lines(base)
            base += len(step.bytes)
            CPU.count(partial(replay.feed, text))

    try:
        replay.feed(step.header())
        result = timed(replay, config.parts, play)
        replay.finish()
        return result, replay.figures()
    finally:
        replay.close()


def engine_only(case: Case, step: Step, config: Config) -> tuple[Timing, dict[str, float]]:
    """Replay as many events by repeating the step's columns."""
    replay = _core.Replay(options(case, config, step.peak))
    try:
        replay.set_step(step.columns())
        replay.run_step(1)
        repeats = max(int(config.events / replay.figures()["events"] / config.parts), 1)
        result = timed(replay, config.parts, lambda: CPU.count(lambda: replay.run_step(repeats)))
        return result, replay.figures()
    finally:
        replay.close()


def measure(config: Config) -> Report:
    """Every case, with parsing and without."""
    step = Step(config.layers)
    report = Report("replay", asdict(config))
    load = os.getloadavg()[0]
    rows = []
    ways = (("with parsing", with_parsing), ("engine only", engine_only))
    with cases(len(CASES) * len(ways)) as advance:
        for case, (name, run) in over(itertools.product(CASES, ways), advance):
            note(f"{case.name}, {name}")
            timing, figures = run(case, step, config)
            rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            spread = Spread.of(timing.cpu_ns)
            report.results.append(
                Result(f"{case.name}: an event, {name}", spread, "ns", TARGET_NS, "processor time")
            )
            report.details[f"{case.name}, {name}"] = {
                "cpu_ns": timing.cpu_ns,
                "wall_ns": timing.wall_ns,
                "last_step": figures,
                "peak_rss_bytes": rss,
            }
            wall = Spread.of(timing.wall_ns).median
            rows.append(
                (case.name, name, f"{figures['events']:,.0f}", f"{1e3 / spread.median:.2f}",
                 f"{1e3 / wall:.2f}", f"{rss / MIB:.0f} MiB")
            )  # fmt: skip
    header = ("case", "what", "events", "M events/s of processor time", "M events/s", "peak RSS")
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
