"""Makes driver calls of a training fail, one at a time, and reports each outcome.

python tests/gpu/sweep.py [--device soft] [--entry NAME ...] [--per-entry N] [--seed S]

With --device soft on the software device, else on the software driver, which needs SOFTCUDA_LIB and
the CUDA build of torch. Every entry point that umem calls while it is enabled and two training
steps run is failed at its n-th call, for n up to the number of its calls: with transient errors,
for a batch also after its first half is executed, and with one that loses the device, which the
software device does not have. Each case ends in one of these ways:

    ok      the steps went through, and all numbers are those of an undisturbed run
    raised  a proper error; the tensors that survive are intact, and the next step works
    late    the call was made fewer than n times: nothing failed
    lost    wrong numbers, a crash, a hang, a pin or memory left behind, an improper error

Races between operators and the driver's moves, discards and frees are reported too. The exit code
is 1 if any case was lost or raced.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORKER = HERE / "sweep_worker.py"
INVALID_VALUE, OUT_OF_MEMORY, NOT_READY, LAUNCH_FAILED = 1, 2, 600, 719
FEW = 8  # up to this many calls of an entry point are all tried, as they differ
Harm = Literal["", "lose", "tear"]
OUTCOMES = ("ok", "raised", "late", "lost")


@dataclasses.dataclass(frozen=True)
class Case:
    """The n-th call of `entry` fails with `error`, and is torn, or loses the device."""

    entry: str = ""
    nth: int = 0
    error: int = 0
    harm: Harm = ""
    plant: str = ""  # errors made by the worker on purpose, to test the sweep

    def __str__(self) -> str:
        harm = {"": "", "lose": ", device lost", "tear": ", torn"}[self.harm]
        return f"{self.entry} call {self.nth} error {self.error}{harm}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    kind: str
    why: str = ""
    calls: dict[str, int] = dataclasses.field(default_factory=dict)  # for every entry point
    seconds: float = 0.0
    races: list[str] = dataclasses.field(default_factory=list)


class Worker:
    """A process that runs cases one after the other."""

    def __init__(self, seed: int, device: str) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), str(seed), device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, bufsize=1,
        )  # fmt: skip

    def run(self, case: Case, timeout: float) -> Outcome:
        """Return the case's outcome; if it was lost, the worker has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer
            print(json.dumps(dataclasses.asdict(case)), file=self.process.stdin, flush=True)
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            self.stop()
            return Outcome("lost", f"it hangs for {timeout:g} s")
        line = self.process.stdout.readline()
        if line:
            outcome = Outcome(**json.loads(line))
            if outcome.kind == "lost":
                self.stop()  # its state is unknown
            return outcome
        self.stop()
        self.log.seek(0)
        said = " | ".join(self.log.read().strip().splitlines()[-3:])
        return Outcome("lost", f"it crashes, exit {self.process.returncode}: {said}")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Ends the process, which exits by itself if it still reads."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=1)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


def entry_points() -> list[str]:
    """The entry points that umem may call: the driver table."""
    text = (ROOT / "src/driver/symbols.def").read_text(encoding="utf-8")
    return re.findall(r"^UMEM_SYMBOL\((\w+),", text, re.MULTILINE)


def chosen(calls: int, limit: int) -> list[int]:
    """Return 1 to `calls` if they are few, else `limit` of them, evenly, with both ends."""
    if calls <= max(limit, FEW):
        return list(range(1, calls + 1))
    return sorted({1 + round(i * (calls - 1) / (limit - 1)) for i in range(limit)})


def errors(entry: str, device: str) -> Iterator[tuple[int, Harm]]:
    """Return the errors that the call may report, with their further effects."""
    if entry in ("cuEventQuery", "cuStreamQuery"):
        yield NOT_READY, ""
    yield INVALID_VALUE, ""
    yield OUT_OF_MEMORY, ""
    if "Batch" in entry:
        yield OUT_OF_MEMORY, "tear"
    if device == "cuda":
        yield LAUNCH_FAILED, "lose"


def cases(calls: dict[str, int], limit: int, plant: str, device: str) -> list[Case]:
    """Every entry point with each of its errors; a lost device a third as often."""
    found = []
    for entry in sorted(calls):
        for error, harm in errors(entry, device):
            nths = chosen(calls[entry], max(2, limit // 3) if harm == "lose" else limit)
            found += [Case(entry, nth, error, harm, plant) for nth in nths]
    return found


def count(worker: Worker, timeout: float) -> dict[str, int]:
    """Return the number of calls of each entry point in a case without a failure."""
    worker.run(Case(), timeout + 60)  # the first one makes more: libraries start, umem is built
    clean = worker.run(Case(), timeout)
    if clean.kind != "ok":
        raise SystemExit(f"the step fails without any planned failure: {clean.kind}, {clean.why}")
    return {name: n for name, n in clean.calls.items() if n}


def sweep(options: argparse.Namespace) -> int:
    """Runs the cases and prints the table; the number of lost cases and of races."""
    worker = Worker(options.seed, options.device)
    calls = count(worker, options.timeout)
    if unknown := set(options.entry or []) - set(calls):
        raise SystemExit(f"{', '.join(sorted(unknown))}: not called; called: {', '.join(calls)}")
    calls = {name: n for name, n in calls.items() if not options.entry or name in options.entry}
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    lost, races = [], []
    started = time.monotonic()
    for case in cases(calls, options.per_entry, options.plant, options.device):
        if not worker.alive:
            worker = Worker(options.seed, options.device)
        outcome = worker.run(case, options.timeout)
        table[case.entry][outcome.kind] += 1
        if options.verbose:
            print(f"{case}: {outcome.kind} {outcome.why} ({outcome.seconds:.2f} s)", flush=True)
        if outcome.kind == "lost":
            lost.append(f"lost: {case}: {outcome.why}")
        if case.harm != "lose":  # what a lost device was given is in no order, and of no use
            races += [f"race: {case}: {text}" for text in outcome.races]
    worker.stop()
    report(calls, table, options.per_entry, time.monotonic() - started)
    print("\n".join([*lost, *races, f"lost {len(lost)}, races {len(races)}"]))
    return len(lost) + len(races)


def report(
    calls: dict[str, int],
    table: dict[str, collections.Counter[str]],
    limit: int,
    seconds: float,
) -> None:
    """Prints calls against outcomes, one line an entry point."""
    width = max(len(name) for name in calls)
    print(f"{'entry point':{width}} {'calls':>6} {'tried':>6}", *(f"{o:>7}" for o in OUTCOMES))
    total: collections.Counter[str] = collections.Counter()
    for name, n in sorted(calls.items()):
        tried = len(chosen(n, limit))
        counts = (f"{table[name][outcome]:>7}" for outcome in OUTCOMES)
        print(f"{name:{width}} {n:>6} {tried:>6}", *counts)
        total += table[name]
    counts = (f"{total[outcome]:>7}" for outcome in OUTCOMES)
    print(f"{'all':{width}} {sum(calls.values()):>6} {'':>6}", *counts)
    print(
        f"{sum(total.values())} cases in {seconds:.0f} s; an entry point called more than {FEW} "
        f"times has {limit} of its calls tried, evenly among all; each with every error"
    )


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=raw)
    parser.add_argument("--device", choices=("cuda", "soft"), default="cuda")
    parser.add_argument("--entry", action="append", help="only this entry point (repeatable)")
    parser.add_argument("--per-entry", type=int, default=6, help="calls of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="of deferred work (%(default)s)")
    parser.add_argument("--timeout", type=float, default=30.0, help="of a case, s (%(default)s)")
    parser.add_argument("--plant", default="", help="what the worker does wrong on purpose")
    parser.add_argument("--verbose", action="store_true", help="a line a case")
    options = parser.parse_args()
    if options.per_entry < 2:
        parser.error("--per-entry: at least 2, the first and the last call")
    sys.exit(1 if sweep(options) else 0)


if __name__ == "__main__":
    main()
