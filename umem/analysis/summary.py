"""Summary of a planned step: its peak, the cost of a budget, and advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..base.device_profiles import DeviceProfile, with_link
from ..base.units import format_bytes
from ..capture.recording import OpCost, Recording
from ..trace.ids import TensorIndex
from ..trace.step_trace import StepTrace
from . import bounds

COLUMNS = 60  # of the picture over time
MAX_TENSORS = 5
_LARGE_SHARE = 0.25  # of the peak; advice is given on tags with more
_SLACK = 1 + 1e-9  # a floor this close to the compute time counts as equal to it


@dataclass(frozen=True)
class Place:
    """An op of the step."""

    op: int  # its index
    name: str
    module: str  # its path in the model; empty where it is in none, or unknown
    phase: str  # forward, backward, optimizer

    def __str__(self) -> str:
        inside = f" in {self.module}" if self.module else ""
        return f"{self.name}{inside} (op {self.op}, {self.phase or 'unknown phase'})"


@dataclass(frozen=True)
class Holder:
    """A tensor that is alive at the peak."""

    bytes: int
    tag: str
    family: str
    module: str


@dataclass(frozen=True)
class Memory:
    """A step's memory. Sizes are device bytes."""

    peak_bytes: int
    peak: Place
    by_tag: dict[str, int]  # at the peak, largest first
    largest: tuple[Holder, ...]
    over_time: dict[str, tuple[int, ...]]  # the maximum of each tag in COLUMNS parts of time
    largest_op: Place
    largest_op_bytes: int


def memory(step: StepTrace, recording: Recording) -> Memory:
    """Return the memory of a step of `recording`."""
    costs = costs_of(step, recording)
    peak_op = int(np.argmax(step.live_bytes))
    alive = np.flatnonzero((step.first <= peak_op) & (step.last >= peak_op))
    tags: dict[str, int] = {}
    for tensor in alive:
        tag = step.tags[tensor] or "unknown"
        tags[tag] = tags.get(tag, 0) + int(step.bytes[tensor])
    by_tag = dict(sorted(tags.items(), key=lambda item: -item[1]))
    order = alive[np.argsort(-step.bytes[alive], kind="stable")][:MAX_TENSORS]
    need = bounds.largest_op(step)
    return Memory(
        peak_bytes=step.peak_bytes,
        peak=_place(step, costs, peak_op),
        by_tag=by_tag,
        largest=tuple(_holder(step, recording, TensorIndex(tensor)) for tensor in order.tolist()),
        over_time={tag: _over_time(step, tag) for tag in by_tag},
        largest_op=_place(step, costs, need.op),
        largest_op_bytes=need.bytes,
    )


def hidden_from(step: StepTrace, device: DeviceProfile) -> int | None:
    """Return the minimum budget at which the floor is compute alone, to 0.1 % of the peak.

    Below it no schedule hides all transfers; at it and above, the bounds allow one. None if even
    the whole peak is not enough.
    """
    low, high = int(step.working_set.max(initial=0)), step.peak_bytes
    if not _hides(step, device, high):
        return None
    if _hides(step, device, low):
        return low
    while high - low > max(step.peak_bytes >> 10, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if _hides(step, device, middle) else (middle, high)
    return high


def link_that_hides(step: StepTrace, device: DeviceProfile, budget: int) -> float | None:
    """Return the GB/s each way at which the floor at `budget` is compute alone.

    None if more than 10 TB/s are needed, or 1 MB/s are enough: something else takes the time.
    """
    low, high = 1e-3, 1e4
    if not _hides(step, with_link(device, high), budget):
        return None
    if _hides(step, with_link(device, low), budget):
        return None
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        hides = _hides(step, with_link(device, middle), budget)
        low, high = (low, middle) if hides else (middle, high)
    return high


def place(step: StepTrace, recording: Recording, op: int) -> Place:
    """Return the place in the program of an op of the step."""
    return _place(step, costs_of(step, recording), op)


def advice(
    found: Memory, step: StepTrace, device: DeviceProfile, budget: int, slowdown: float | None
) -> list[str]:
    """Return changes that would help at this budget, the largest effect first.

    Args:
        slowdown: the best predicted step over compute; None if nothing was replayed.
    """
    told: list[str] = []
    at_once = found.largest_op
    if found.largest_op_bytes * 2 > found.peak_bytes and "_foreach_" in at_once.name:
        # Optimizers of torch take no norms.
        clips = "_foreach_norm" in at_once.name
        who = "clip_grad_norm_" if clips else "the optimizer"
        told.append(
            f"{who} works on all tensors in one op ({at_once.name}, "
            f"{format_bytes(found.largest_op_bytes)}), which none of them can leave meanwhile: "
            f"foreach=False in {who} needs one parameter's tensors at a time"
        )
    if budget >= found.peak_bytes:
        return told
    for tag, size in found.by_tag.items():
        if size > _LARGE_SHARE * found.peak_bytes and tag in _BY_TAG:
            told.append(f"{tag} holds {format_bytes(size)} at the peak: {_BY_TAG[tag]}")
    by_batch = sum(found.by_tag.get(tag, 0) for tag in ("activation", "input", "temp"))
    if by_batch > _LARGE_SHARE * found.peak_bytes:
        half = format_bytes(found.peak_bytes - by_batch // 2)
        told.append(f"half the batch needs about {half}")
    if slowdown is not None and slowdown > 1.01:
        link = link_that_hides(step, device, budget)
        if link is not None and link * 1e3 > min(device.bytes_per_us_in, device.bytes_per_us_out):
            told.append(f"a link of {link:.3g} GB/s each way, or more, could hide all transfers")
    return told


_BY_TAG = {
    "activation": "umem.optimize(model) recomputes them instead; --recompute all shows the cost",
    "optimizer": "an optimizer with smaller states (8-bit Adam, SGD, Adafactor) needs less",
    "param": "a narrower dtype (bfloat16) halves 32-bit weights",
    "grad": "zero_grad(set_to_none=True) right after the step frees them while forward runs",
    "temp": "they are results inside the backward pass and the optimizer, used once",
}


def _hides(step: StepTrace, device: DeviceProfile, capacity: int) -> bool:
    floor = bounds.closed_form_floor(step, device, capacity)
    return floor.us <= step.compute_us * _SLACK


def costs_of(step: StepTrace, recording: Recording) -> Sequence[OpCost]:
    """Return the recorded cost of each op of the step; none if the ops do not match one to one."""
    ops = [(op, cost) for op, cost in recording.last_step() if recording.touches_memory(op)]
    names = tuple(op.name for op, _ in ops)
    return [cost for _, cost in ops] if names == step.op_names else []


def _place(step: StepTrace, costs: Sequence[OpCost], op: int) -> Place:
    if not costs:
        return Place(op, step.op_names[op], "", "")
    return Place(op, step.op_names[op], costs[op].module, costs[op].phase)


def _holder(step: StepTrace, recording: Recording, tensor: TensorIndex) -> Holder:
    block = recording.blocks[step.block_of(tensor)]
    return Holder(int(step.bytes[tensor]), block.tag, block.family, block.module)


def _over_time(step: StepTrace, tag: str) -> tuple[int, ...]:
    live = step.live_bytes_of(np.array([(name or "unknown") == tag for name in step.tags]))
    edges = np.linspace(0.0, step.compute_us, COLUMNS + 1)
    first = np.maximum(np.searchsorted(step.begin_us, edges[:-1], "right") - 1, 0)
    end = np.maximum(np.searchsorted(step.begin_us[:-1], edges[1:], "left"), first + 1)
    return tuple(
        int(live[begin:stop].max(initial=0)) for begin, stop in zip(first, end, strict=True)
    )
