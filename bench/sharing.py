"""Memory of a step under each allocator: ``python bench/sharing.py [--smoke]``.

Writes sharing_<hardware>_<date>.{json,md} to bench/results. No figure depends on the machine: steps
are recorded on fake tensors, umem's arena is replayed by the engine, torch's allocator is a model.
With ``--check-model`` that model is compared with torch's own allocator, on a GPU; this one writes
sharing-model_*.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from harness import Report, Result, Spread, add_outputs, cases, note, results_folder, table
from inside import inside
from policies.traces import Traces
from policies.workloads import WORKLOADS

from umem import _core
from umem.analysis.caching_allocator import CachingAllocator
from umem.base import device_profiles
from umem.base.device_profiles import DeviceProfile
from umem.base.progress import over
from umem.base.units import GIB, PAGE_BYTES
from umem.errors import NotSupportedError
from umem.layout import packing
from umem.layout.layout import NO_PLACE, Layout, layout
from umem.simulation import replay
from umem.trace.step_trace import Ints, Kind, StepTrace

HERE = Path(__file__).resolve().parent
WORK = HERE.parent / "build" / "bench-policies"  # the traces are those of that bench
DEVICE = "a100-pcie4"  # durations do not matter here
TARGET = 1.02  # the load's, in umem's layout
STEPS = 3  # the last one is evaluated: in steady state
# Calls that move, create or drop memory; kernels and events do not concern the allocator.
MOVES = (
    "cuMemAllocManaged", "cuMemFree", "cuMemPrefetchAsync", "cuMemPrefetchBatchAsync",
    "cuMemDiscardBatchAsync", "cuMemDiscardAndPrefetchBatchAsync",
)  # fmt: skip


@dataclass(frozen=True)
class Held:
    """The max device bytes that an allocator held, and its driver calls in a steady step."""

    allocator: str
    bytes: int
    load: int  # the peak of live bytes, in its allocation units
    calls: int
    dropped: int = 0  # bytes per step that the engine dropped and populated again


@dataclass(frozen=True)
class Row:
    """One workload."""

    workload: str
    asked: int  # the load, in requested bytes
    pages: int  # and as umem takes them: large ones in whole pages
    layout_ms: float
    held: tuple[Held, ...]


def row(name: str, step: StepTrace, asked: Ints) -> Row:
    """Run all allocators on one step; `asked` are the requested bytes of each tensor."""
    begin = time.perf_counter()
    chosen = layout(step)
    took = (time.perf_counter() - begin) * 1e3
    device = device_profiles.find(DEVICE)
    plenty = 4 * step.peak_bytes
    tight = max(int(TARGET * step.peak_bytes), replay.min_budget(step))
    held = [
        _arena("umem, no layout", step, None, device, plenty),
        _arena("umem, no layout, tight", step, None, device, tight),
        _arena("umem, layout", step, chosen, device, plenty),
        _arena("umem, layout, tight", step, chosen, device, tight),
        _packed("best fit alone", step, layout(step, packing.best_fit)),
        _packed("SmartPool alone", step, layout(step, packing.first_fit)),
        _torch("torch", step, asked, expandable=False),
        _torch("torch, expandable", step, asked, expandable=True),
    ]
    return Row(name, _load(step, asked), step.peak_bytes, took, tuple(held))


def _arena(
    name: str, step: StepTrace, chosen: Layout | None, device: DeviceProfile, budget: int
) -> Held:
    """Run the engine in virtual time; return its resident bytes."""
    play = replay.open_step(step, "lru", device, budget // PAGE_BYTES * PAGE_BYTES)
    try:
        if chosen is not None and (chosen.offsets != NO_PLACE).any():
            _core.install_layout(chosen.sizes, chosen.offsets, chosen.bytes)
        inside.instrument()
        most = 0
        for _ in range(STEPS):
            before = _calls()
            play.run_step(1)
            most = max(most, int(play.figures()["peak_resident_bytes"]))
        last = play.figures()
        discarded = int(last["bytes_discarded"])
        return Held(name, most, step.peak_bytes, _calls() - before, discarded)
    finally:
        play.close()


def _calls() -> int:
    return sum(inside.calls(name) for name in MOVES)


def _packed(name: str, step: StepTrace, chosen: Layout) -> Held:
    """Return a packer's range, plus the weights and the peak of the small tensors."""
    large = step.large & (step.kind == Kind.PERSISTENT)
    beside = int(step.bytes[large].sum()) + step.small_bytes
    return Held(name, chosen.bytes + beside, step.peak_bytes, 0)


def _torch(name: str, step: StepTrace, asked: Ints, *, expandable: bool) -> Held:
    """Run the model; return its reserved bytes."""
    model = CachingAllocator(expandable=expandable)
    places: dict[int, int] = {}
    for tensor in np.flatnonzero(step.kind == Kind.PERSISTENT).tolist():
        places[tensor] = model.malloc(int(asked[tensor]))
    calls = 0
    for _ in range(STEPS):
        calls = model.driver_calls
        for allocate, tensor in requests(step):
            if allocate:
                places[tensor] = model.malloc(int(asked[tensor]))
            else:
                model.free(places.pop(tensor))
    return Held(name, model.peak_reserved, model.peak_allocated, model.driver_calls - calls)


def requests(step: StepTrace) -> Iterator[tuple[bool, int]]:
    """Return (allocate or free, tensor) of a step in program order, without persistent tensors.

    Tensors that a step leaves are freed at its end.
    """
    begins: list[list[int]] = [[] for _ in range(step.n_ops + 1)]
    ends: list[list[int]] = [[] for _ in range(step.n_ops + 1)]
    for tensor in np.flatnonzero(step.kind != Kind.PERSISTENT).tolist():
        begins[step.first[tensor]].append(tensor)
        ends[step.last[tensor] + 1].append(tensor)
    for made, gone in zip(begins, ends, strict=True):
        yield from ((False, tensor) for tensor in gone)
        yield from ((True, tensor) for tensor in made)


def _load(step: StepTrace, amount: Ints) -> int:
    change = np.zeros(step.n_ops + 1, np.int64)
    np.add.at(change, step.first, amount)
    np.add.at(change, step.last + 1, -amount)
    return int(np.cumsum(change).max(initial=0))


def report(rows: Sequence[Row]) -> Report:
    """Return the fragmentation tables."""
    page = Report("sharing", {"workloads": ", ".join(r.workload for r in rows), "steps": STEPS})
    page.details = {"rows": [asdict(r) for r in rows]}
    names = [held.allocator for held in rows[0].held]
    page.sections += ["## Held bytes over the requested load", ""]
    page.sections += table(
        ("workload", "load, GiB", "in whole pages", *names),
        ([r.workload, f"{r.asked / GIB:.3f}", f"{r.pages / r.asked:.4f}",
          *(f"{h.bytes / r.asked:.4f}" for h in r.held)] for r in rows),
    )  # fmt: skip
    page.sections += ["## Fragmentation: 1 - load / held, in the allocator's own units", ""]
    page.sections += table(
        ("workload", *names),
        ([r.workload, *(f"{1 - h.load / h.bytes:.2%}" for h in r.held)] for r in rows),
    )
    page.sections += ["## In a steady step: driver calls, and GiB dropped and populated again", ""]
    page.sections += table(
        ("workload", *names),
        ([r.workload, *(_steady(h) for h in r.held)] for r in rows),
    )
    page.sections += [
        "`tight`: with a budget of 1.02 times the peak in whole pages. `alone`: that packer's "
        "range with the weights and the peak of the small tensors next to it. torch's rows are a "
        "model; sharing-model_* has what torch's own allocator reserved. On a GPU: not measured.",
        "",
    ]
    for i, name in enumerate(names):
        target = TARGET if name.startswith("umem, layout") else None
        in_units = max(r.held[i].bytes / r.held[i].load for r in rows)
        as_asked = max(r.held[i].bytes / r.asked for r in rows)
        for what, worst in (("in its units", in_units), ("as asked for", as_asked)):
            spread = Spread.of([worst])
            page.results.append(Result(f"{name}: held / load {what}, worst", spread, "x", target))
    return page


def _steady(held: Held) -> str:
    return f"{held.calls}" + (f" ({held.dropped / GIB:.1f})" if held.dropped else "")


def _row_of(name: str, work: Path) -> Row:
    note(name)
    traces = Traces(name, work)
    return row(name, traces.on(DEVICE)[1], traces.asked(DEVICE))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/sharing.py", description=__doc__)
    known = list(WORKLOADS)
    parser.add_argument(
        "--workload", nargs="+", choices=known, metavar="NAME", help=", ".join(known)
    )
    add_outputs(parser)
    parser.add_argument(
        "--check-model", action="store_true", help="the model against a GPU's torch"
    )
    parser.add_argument("--work", type=Path, default=WORK, help="traces (build/bench-policies)")
    args = parser.parse_args(argv)
    folder = results_folder(parser, args)
    chosen = args.workload or [w.name for w in WORKLOADS.values() if w.smoke == args.smoke]
    with cases(len(chosen)) as advance:
        names = over(chosen, advance)
        if args.check_model:
            try:
                page = check_model(names, args.work)
            except NotSupportedError as error:
                parser.error(f"--check-model: {error}")
        else:
            page = report([_row_of(name, args.work) for name in names])
    print(page.markdown())
    if folder is not None:
        print("\n".join(map(str, page.write(folder))))
    return 0


def check_model(names: Iterable[str], work: Path) -> Report:
    """Plays each step on torch's own allocator, in a process without umem on.

    Raises:
        NotSupportedError: torch sees no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise NotSupportedError("torch sees no GPU: its allocator cannot be asked what it reserves")
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    expandable = bool(settings["expandable_segments"])
    rows = []
    for name in names:
        traces = Traces(name, work)
        step, asked = traces.on(DEVICE)[1], traces.asked(DEVICE)
        rows.append(
            (name, _real(step, asked), _torch("", step, asked, expandable=expandable).bytes)
        )
    config = {
        "device": torch.cuda.get_device_name(),
        "expandable_segments": expandable,
        "steps": STEPS,
    }
    page = Report("sharing-model", config)
    page.sections += table(("workload", "torch reserved, bytes", "the model"), rows)
    page.details = {"rows": rows}
    worst = max(abs(model - real) / real for _, real, model in rows)
    page.results.append(Result("difference, worst", Spread.of([worst * 100]), "%", 0.0))
    return page


def _real(step: StepTrace, asked: Ints) -> int:
    """Return the max bytes that torch's allocator reserved."""
    import torch

    allocate = torch.cuda.caching_allocator_alloc
    free = torch.cuda.caching_allocator_delete
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fixed = np.flatnonzero(step.kind == Kind.PERSISTENT).tolist()
    places = {tensor: allocate(int(asked[tensor])) for tensor in fixed}
    for _ in range(STEPS):
        for made, tensor in requests(step):
            if made:
                places[tensor] = allocate(int(asked[tensor]))
            else:
                free(places.pop(tensor))
    for place in places.values():
        free(place)
    return int(torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    raise SystemExit(main())
