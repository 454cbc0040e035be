"""Small costs, one part a process: ``python bench/micro.py PART ROUNDS [CACHE]``.

Prints one JSON object: the values of each candidate by name, one value a round.
CACHE is where the extension for torch is kept.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import interleave
from inside import inside

import umem
from umem.base.units import MIB
from umem.integrations.torch import cpu

BUDGET = 64 * MIB
OPS = 20_000
ALLOCATIONS = {"4MiB": 4 * MIB, "256B": 256}
ITERATIONS = 20_000
CACHE = Path(sys.argv[3]) if len(sys.argv) > 3 else None

Values = dict[str, list[float]]


def on(observer: str, policy: str = "lru") -> umem.Session:
    """Umem with a small budget."""
    return umem.enable(
        budget=BUDGET, device="soft", policy=policy, observer=observer, torch_ext_cache=CACHE
    )


def observer(rounds: int) -> Values:
    """Ns of a 1-element add (2 inputs, 1 output): plain torch, umem blind, umem observing."""

    def loop() -> float:
        add = torch.add
        one, two = torch.ones(1), torch.ones(1)  # umem's own where it is on
        begin = time.perf_counter_ns()
        for _ in range(OPS):
            add(one, two)
        return (time.perf_counter_ns() - begin) / OPS

    def under(mode: str) -> Callable[[], float]:
        def measure() -> float:
            with on(observer=mode):
                loop()  # warm: caches of names, the first segment
                return loop()

        return measure

    candidates = {"plain": loop, "off": under("off"), "native": under("native")}
    return interleave(candidates, rounds)


def alloc(rounds: int) -> Values:
    """Ns of one allocation and its free, cached, in native loops."""
    candidates: dict[str, Callable[[], float]] = {}
    for label, size in ALLOCATIONS.items():
        candidates[f"umem {label}"] = _umem_alloc(size)
        candidates[f"glibc {label}"] = _glibc_alloc(size)
        candidates[f"torch {label}"] = _torch_alloc(size)
    return interleave(candidates, rounds)


def _umem_alloc(size: int) -> Callable[[], float]:
    def measure() -> float:
        with on(observer="off"):
            return float(inside.bench_alloc(size, ITERATIONS))

    return measure


def _glibc_alloc(size: int) -> Callable[[], float]:
    return lambda: float(inside.bench_malloc(size, ITERATIONS))


def _torch_alloc(size: int) -> Callable[[], float]:
    """Umem is off here, so that torch's allocator is its own."""
    return lambda: float(cpu.extension(CACHE).bench_cpu_alloc(size, ITERATIONS))


def fault(rounds: int) -> Values:
    """Us of one page fault on the software device, policy `none`, as time by faults counted.

    `first touch` finds a page without data. `in` brings a page from the host and must send
    another one out, because the tensor is twice the budget.
    """
    pages = 2 * BUDGET // (2 * MIB)
    floats_a_page = 2 * MIB // 4

    def touch(x: torch.Tensor) -> float:
        """Write one float of each page."""
        before = umem.stats().faults
        begin = time.perf_counter_ns()
        x[::floats_a_page].add_(1.0)
        elapsed = time.perf_counter_ns() - begin
        faults = umem.stats().faults - before
        if faults < pages // 2:
            raise RuntimeError(f"{faults} faults over {pages} pages: nothing to measure")
        return elapsed / 1e3 / faults

    values: Values = {"first touch": [], "in and out": []}
    for _ in range(rounds):
        with umem.enable(budget=BUDGET, device="soft", policy="none", observer="off"):
            x = torch.empty(pages * floats_a_page)
            values["first touch"].append(touch(x))
            x.fill_(1.0)
            values["in and out"].append(touch(x))
            del x
    return values


PARTS = {"observer": observer, "alloc": alloc, "fault": fault}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(PARTS[sys.argv[1]](int(sys.argv[2]))))
