"""The trainings that are compared, each in a process of its own and never without the guard."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from harness import interleave

from gpu.parts import Bench
from gpu.record import TIME_USED_UP, Guard, GuardError
from umem.base.stats import plan_hit_share
from umem.base.units import MIB, PAGE_BYTES
from umem.config import settings
from umem.demo.process import RunSpec, WorkerProcess
from umem.policies import registry

TORCH = "torch"  # instead of a policy: torch's own allocator
OFFLOAD = "save_on_cpu"  # torch's own way to need less
SMALLEST = 32 * MIB  # budget: below it, one operator may not fit
SHARE = 0.8  # of the guard's limit that a peak may take: umem rounds blocks up
AMPLE = 1.2  # times the peak, as the budget of a step that fits
TARGET = 1.01  # times torch's step, for a step that fits


def environment(
    budget: int, host_budget: int, cache: str, backing: str = "managed"
) -> dict[str, str]:
    """Return the environment of every child: the guard is on, and both budgets are always set."""
    path = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        **settings.child_environment(),
        "UMEM_TORCH_EXT_CACHE": cache,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": "1",  # equal bits on the software driver; a GPU's do not depend on it
        "UMEM_GUARD": "1",
        "UMEM_BACKING": backing,
        "UMEM_BUDGET": str(budget),
        "UMEM_HOST_BUDGET": str(host_budget),
    }


@contextlib.contextmanager
def training(
    bench: Bench, net: str, way: str = TORCH, deterministic: bool = False
) -> Iterator[WorkerProcess]:
    """Start a training: `way` is torch's, or a policy/backing.

    Under umem it holds all of the guard's room until it ends.

    Raises:
        GuardError: the guard has no room.
        StateError: it does not start, or fails later.
    """
    room, under_umem = bench.guard.limit, way != TORCH
    policy, _, backing = way.partition("/")
    half = room // 2 // PAGE_BYTES * PAGE_BYTES
    options: dict[str, Any] = {"policy": policy, "budget": half} if under_umem else {}
    share = bench.guard.share(room, f"{net} under umem") if under_umem else contextlib.nullcontext()
    with (
        share,
        WorkerProcess(
            RunSpec(net, device="cuda", deterministic=deterministic, **options),
            on_note=lambda text: print(text, file=sys.stderr, flush=True),
            timeout=bench.part.seconds,
            command=[sys.executable, "-W", "ignore", "-m", "gpu.worker"],
            environment=environment(half, room - half, bench.cache, backing or "managed"),
        ) as process,
    ):
        yield process


def budgets(bench: Bench, nbytes: float) -> dict[str, int]:
    """Return the arguments of `train` for a budget; the host gets the rest of the guard's limit."""
    budget = max(int(nbytes) // PAGE_BYTES * PAGE_BYTES, SMALLEST)
    return {"budget": budget, "host_budget": bench.guard.limit - budget}


def peak_of(bench: Bench, net: str, process: WorkerProcess) -> int:
    """Return the bytes that plain torch had allocated at most.

    Raises:
        GuardError: umem could exceed the guard's limit with it.
    """
    peak = int(process.call("peak")["bytes"])
    with Guard(bench.guard.limit).share(int(peak / SHARE), f"{net}, with what umem rounds up,"):
        return peak


def bits(bench: Bench) -> None:
    """Compare the weights after some steps at each budget, with umem and without."""
    items = {name: partial(_same_bits, bench, name) for name in bench.config.bits}
    bench.record.take(items, bench.deadline)


def _same_bits(bench: Bench, net: str) -> None:
    """Train with torch's own allocator, twice, then under each policy, a budget after another.

    All of it fits in the first.

    Raises:
        RuntimeError: weights differ.
    """
    found = bench.record.details.setdefault("weights", {}).setdefault(net, {})
    peak = 0
    for name in (TORCH, f"{TORCH} again", *bench.config.ways):
        way = name if name in bench.config.ways else TORCH
        digests, evictions = [], 0
        with training(bench, net, way, deterministic=True) as process:
            for fraction in bench.config.bits_fractions:
                sizes = budgets(bench, fraction * peak) if way != TORCH else {}
                did = process.call("train", steps=bench.config.warm_steps + 2, **sizes)["did"]
                digests.append(process.call("digest")["sha256"])
                evictions += did.get("evictions", 0)
            peak = peak or peak_of(bench, net, process)
        found[name] = {"weights": digests, "evictions": evictions}
        same = digests == found[TORCH]["weights"]
        bench.record.add(f"{net}, {name}: bits unlike torch's", [float(not same)], "", 0)
        if not same:
            raise RuntimeError(f"{name} has other bits than {TORCH}: see `weights` in the details")


def fits(bench: Bench) -> None:
    """Compare the step under umem with torch's own allocator, the two taking turns."""
    ways = [way for way in bench.config.ways if way.partition("/")[0] == registry.DEFAULT]
    items = {
        f"{net} fits, {way}": partial(_fit, bench, net, way)
        for net in bench.config.fits
        for way in ways
    }
    bench.record.take(items, bench.deadline)


def _fit(bench: Bench, net: str, way: str) -> None:
    """Train in two processes."""
    config, record, label = bench.config, bench.record, f"{net} fits, {way}"
    with training(bench, net) as plain, training(bench, net, way) as under:
        plain.call("train", steps=config.warm_steps)
        peak = peak_of(bench, net, plain)
        under.call("train", steps=config.warm_steps, **budgets(bench, AMPLE * peak))
        times: dict[str, list[float]] = {TORCH: [], "umem": []}
        steps = {TORCH: partial(_step, plain), "umem": partial(_step, under)}
        for _ in bench.deadline.rounds(config.fits_rounds):
            for name, values in interleave(steps, 2).items():
                times[name] += values
        last = under.call("train", steps=1)
    for name, values in times.items():
        record.add(f"{label}: {name}, a step", values, "ms")
    quotients = [ours / theirs for ours, theirs in zip(times["umem"], times[TORCH], strict=True)]
    record.add(f"{label}: umem to torch", quotients, "x", TARGET)
    record.details.setdefault("fits", {})[label] = {"peak_bytes": peak, "last_step": last}


def _step(process: WorkerProcess) -> float:
    return float(process.call("train", steps=1)["ms"][0])


def outofcore(bench: Bench) -> None:
    """Compare one network under umem, at parts of its peak, with what torch can do.

    The record's details have `rows`: a way to train, its budget, its steps. The report adds the
    lower bound of the step time, which takes no time on the device.
    """
    bench.record.details |= {"net": bench.config.outofcore or bench.part.net, "rows": []}
    under_umem = {way: partial(_in_less, bench, way) for way in bench.config.ways}
    bench.record.take({TORCH: partial(_plain, bench), **under_umem}, bench.deadline)


def _plain(bench: Bench) -> None:
    """Train with all the memory that torch wants, then with activations saved on the host."""
    net = bench.record.details["net"]
    with training(bench, net) as process:
        for way in (TORCH, OFFLOAD):
            process.call("train", steps=2, offload=way == OFFLOAD)
            answer = process.call("train", steps=bench.config.steps, offload=way == OFFLOAD)
            _keep(bench, {"way": way, "ms": answer["ms"]})
            if way != TORCH:
                continue
            try:
                bench.record.details["peak_bytes"] = peak_of(bench, net, process)
            except GuardError as error:
                bench.record.leave_out(net, str(error))


def _in_less(bench: Bench, way: str) -> None:
    """Train at each budget with one policy and backing."""
    details, warm = bench.record.details, bench.config.warm_steps
    if "peak_bytes" not in details:
        bench.record.leave_out(way, "the network does not fit below the guard")
        return
    plans = way.partition("/")[0] == registry.DEFAULT
    with training(bench, details["net"], way) as process:
        for fraction in bench.config.fractions:
            if not bench.deadline.left:
                bench.record.leave_out(f"{way} at {fraction:.2f} of the peak", TIME_USED_UP)
                continue
            sizes = budgets(bench, fraction * details["peak_bytes"])
            process.call("train", steps=warm if plans else 2, **sizes)
            answer = process.call("train", steps=bench.config.steps)
            _keep(bench, {"way": way, "fraction": fraction, **answer, **sizes})


def _keep(bench: Bench, row: dict[str, Any]) -> None:
    """Write down a row: it may be the last one that there is time for."""
    record = bench.record
    record.details["rows"].append(row)
    label = f"{record.details['net']}, {way_of(row)}"
    median = record.add(f"{label}: a step", row["ms"], "ms")
    plain = record.details.setdefault("plain_ms", median)
    record.add(f"{label}: to torch with all the memory", [median / plain], "x")
    if did := row.get("did"):
        moved = (did["bytes_in"] + did["bytes_out"]) / len(row["ms"]) / 1e9
        record.add(f"{label}: moved a step, both ways", [moved], "GB")
        planned = plan_hit_share(did["plan_hits"], did["plan_misses"]) or 0.0
        record.add(f"{label}: operators that followed a plan", [100 * planned], "%")
    record.save()


def way_of(row: dict[str, Any]) -> str:
    """Return the way to train and its budget in words."""
    return row["way"] + (f" at {row['fraction']:.2f} of the peak" if "fraction" in row else "")
