"""Optimizer states on a disk: ``python bench/disk_states.py --disk FOLDER [--smoke]``.

Steps of AdamW on the host with states on the disk and in memory, and the states' reads and writes
without an update, interleaved in one process. Writes disk-states_<hardware>_<date>.{json,md} to
bench/results.
"""

from __future__ import annotations

import argparse
import time
import unittest.mock
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from harness import Report, Result, Spread, add_outputs, cases, interleave, ratios, results_folder

import umem
from umem.cli import doctor_disk
from umem.offload.optimizer import state_file

AHEAD = 2  # chunks that are read while one is updated, as in a step


@dataclass(frozen=True)
class Config:
    """Benchmark parameters and repetitions. A tensor is a chunk."""

    tensors: int = 32
    numel: int = 4 << 20
    rounds: int = 11
    threads: int = 1


SMOKE = Config(tensors=3, numel=1 << 18, rounds=2)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/disk_states.py", description=__doc__)
    add_outputs(parser)
    parser.add_argument("--disk", metavar="FOLDER", default=".", help="on a disk (default .)")
    args = parser.parse_args(argv)
    folder = results_folder(parser, args)
    config = SMOKE if args.smoke else Config()
    report = Report("disk-states", asdict(config))
    with cases(config.rounds) as advance:
        measured(config, args.disk, report, advance)
    print(report.markdown())
    if folder is not None:
        print("\n".join(map(str, report.write(folder))))
    return 0


def measured(config: Config, disk: str, report: Report, advance: Callable[[float], None]) -> None:
    """Add times, processor times and their ratios."""
    torch.set_num_threads(config.threads)
    budget = 8 * 4 * config.tensors * config.numel + (256 << 20)  # nothing is evicted
    with umem.enable(budget=budget, device="soft", policy="lru", disk=disk):
        optimizers = [_paged(config), _paged(config)]

        def step_in_memory() -> None:
            with unittest.mock.patch.object(state_file, "current", return_value=None):
                optimizers[1].step()

        def step_on_disk() -> None:
            optimizers[0].step()

        step_in_memory()  # creates the states
        step_on_disk()
        found = state_file.current()
        assert found is not None
        chunks = [[s["exp_avg"], s["exp_avg_sq"]] for s in optimizers[0].state.values()]
        ways = {
            "disk": _timed(step_on_disk),
            "memory": _timed(step_in_memory),
            "reads and writes": _timed(lambda: _move(found, chunks)),
        }
        times = interleave(ways, config.rounds, advance)
        chunks.clear()
        ways.clear()
        optimizers.clear()
    wall = {name: [t[0] for t in values] for name, values in times.items()}
    cpu = {name: [t[1] for t in values] for name, values in times.items()}
    floor = [max(pair) for pair in zip(wall["memory"], wall["reads and writes"], strict=True)]
    moved = 2 * 2 * 4 * config.tensors * config.numel / 1e9  # two states, read and written
    more = [1e3 * (a - b) / moved for a, b in zip(cpu["disk"], cpu["memory"], strict=True)]
    add = report.results.append
    for name, values in wall.items():
        add(Result(f"step, {name}", Spread.of([1e3 * value for value in values]), "ms"))
    add(
        Result("disk / max(memory, reads and writes)", ratios(wall["disk"], floor), "x", target=1.1)
    )
    add(Result("more processor time for a GB moved", Spread.of(more), "ms", target=50))
    report.details |= {"gb_moved_a_step": moved, "disk": doctor_disk.measure(Path(disk))}
    del report.details["disk"]["folder"]


def _paged(config: Config) -> torch.optim.Optimizer:
    made = [torch.nn.Parameter(torch.ones(config.numel)) for _ in range(config.tensors)]
    for parameter in made:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW(made, fused=True)
    umem.page_optimizer(optimizer, update="host")
    return optimizer


def _move(file: state_file.StateFile, chunks: Sequence[list[torch.Tensor]]) -> None:
    loans = [file.lend(chunk) for chunk in chunks[:AHEAD]]
    for number in range(len(chunks)):
        with loans.pop(0):
            pass
        if number + AHEAD < len(chunks):
            loans.append(file.lend(chunks[number + AHEAD]))
    file.settle()


def _timed(call: Callable[[], object]) -> Callable[[], tuple[float, float]]:
    """Return a call that returns its seconds of wall time and of processor time."""

    def timed() -> tuple[float, float]:
        begin, used = time.perf_counter(), time.process_time()
        call()
        return time.perf_counter() - begin, time.process_time() - used

    return timed


if __name__ == "__main__":
    raise SystemExit(main())
