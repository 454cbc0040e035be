"""The page: figures and drawings of a report as compact JSON inside one HTML file."""

from __future__ import annotations

import html
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..base.paths import check_folder, replacing
from ..base.units import PAGE_BYTES
from ..base.version import __version__
from ..errors import ConfigError
from ..simulation.replay import Result
from ..trace.ids import BlockId, TensorIndex
from ..trace.step_trace import Floats, Ints, Kind
from .causes import SMALL, WHY, Cause, Wait
from .findings import Finding, label
from .timeline import OTHER, MoveKind, Timeline

TICKS = 1 << 20  # times in the page are whole ticks of a step
_POINTS = 1500  # per memory curve
_SEGMENTS = 3000  # per lane
_ROWS = 160  # in the map
_RUNS = 400  # per row of the map: the shortest kept run is this fraction of the step
_LEVELS = 4  # of a tensor's resident pages
_TOP = 20  # tensors in the table
_NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Content:
    """All that a page shows."""

    title: str
    line: Timeline
    causes: Sequence[Cause]
    waits: Sequence[Wait]
    findings: Sequence[Finding]
    compared: Sequence[Result]
    origins: Mapping[BlockId, str]
    notes: Sequence[str] = ()  # such as what was not tried
    # A table of runs that were measured, its heads first.
    measured: Sequence[Sequence[str]] = ()


def render(contents: Sequence[Content]) -> str:
    """Return a page of one step or several, which needs no other file and no network."""
    steps = [as_dict(content) for content in contents]
    data = json.dumps(steps, separators=(",", ":"), allow_nan=False)
    parts = {
        "title": html.escape(contents[0].title),
        "style": _static("report.css"),
        "script": _static("report.js"),
        # `</` would end the script element. In JSON only texts have this character.
        "data": data.replace("<", "\\u003c"),
    }
    # In one pass: the texts may contain a placeholder too.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _static("report.html"))


def check(path: Path, option: str) -> None:
    """Check early that a page can be written there.

    Raises:
        ConfigError: its name does not end in .html, or its folder does not exist.
    """
    if path.suffix != ".html":
        raise ConfigError(f"{option} {path}; allowed: FILE.html")
    check_folder(path, option)


def write(path: Path, contents: Sequence[Content]) -> None:
    """Write a page; a file of that name is replaced when the page is whole.

    Raises:
        ConfigError: it cannot be written.
    """
    text = render(contents)
    with replacing(path, ConfigError) as part:
        # Names of files may have bytes that are no UTF-8.
        part.write_text(text, encoding="utf-8", errors="replace")


def _static(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def as_dict(content: Content) -> dict[str, Any]:
    """Return the page's data. Sizes in bytes, times in µs or in ticks of `us_per_tick`."""
    line = content.line
    step_us = float(line.end_us[-1])
    scale = _Scale(step_us)
    return {
        **figures(content),
        "umem": __version__,
        "us_per_tick": step_us / TICKS,
        "memory": _memory(line, scale),
        "lanes": _lanes(line, content.waits, scale),
        "map": _map(content, scale),
    }


def figures(content: Content) -> dict[str, Any]:
    """Return the page's sentences and tables. Sizes in bytes, times in µs."""
    line, result = content.line, content.line.result
    return {
        "title": content.title,
        "policy": result.policy,
        "device": result.device,
        "budget": result.budget,
        "raised_from": result.raised_from,
        "peak": line.step.peak_bytes,
        "ops": line.step.n_ops,
        "tensors": line.step.n_tensors,
        "step_us": result.step_us,
        "compute_us": result.compute_us,
        "stall_us": result.stall_us,
        "host_us": result.host_us,
        "floor_us": result.floor_us,
        "bytes_in": result.bytes_in,
        "bytes_out": result.bytes_out,
        "bound_bytes_in": result.bound_bytes_in,
        "findings": [asdict(finding) for finding in content.findings],
        "notes": list(content.notes),
        "measured": [list(row) for row in content.measured],
        "policies": [_policy(one) for one in content.compared],
        "causes": [{**cause._asdict(), "bytes": cause.bytes} for cause in content.causes],
        "waits": _waits(content),
        "top": _top(content),
    }


class _Scale:
    """Turns times in µs into ticks."""

    def __init__(self, step_us: float) -> None:
        self._factor = TICKS / step_us if step_us else 0.0

    def __call__(self, us: Floats) -> Ints:
        ticks: Ints = np.clip(np.rint(us * self._factor), 0, TICKS).astype(np.int64)
        return ticks


def _deltas(values: Ints) -> list[int]:
    """Return the first value and then the differences, which are short as text."""
    deltas: list[int] = np.diff(values, prepend=0).tolist()
    return deltas


def _policy(result: Result) -> dict[str, Any]:
    keys = ("policy", "step_us", "stall_us", "bytes_in", "bytes_out", "faults", "evictions")
    return {**{key: getattr(result, key) for key in keys}, "unused": result.prefetched_unused}


def _waits(content: Content) -> list[dict[str, Any]]:
    """Return the stalls by cause and by what they waited for, the longest first."""
    sums: dict[tuple[str, str], float] = {}
    for wait in content.waits:
        what = "" if wait.why == "other" else label(content.line, wait.tensor)
        sums[wait.why, what] = sums.get((wait.why, what), 0.0) + wait.us
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return [{"why": WHY[why], "what": what, "us": us} for (why, what), us in ordered]


def _name(content: Content, tensor: int) -> str:
    """Return a tensor's place in the program, or what the trace knows of it."""
    if tensor == OTHER:
        return SMALL
    block = content.line.step.block_of(TensorIndex(tensor))
    return content.origins.get(block) or f"{label(content.line, tensor)}, block {block}"


def _top(content: Content) -> list[dict[str, Any]]:
    """Return the tensors that cost the most: stalls first, then bytes moved, then size."""
    line, step = content.line, content.line.step
    stalled: Floats = np.zeros(step.n_tensors)
    for wait in content.waits:
        if wait.tensor != OTHER:
            stalled[wait.tensor] += wait.us
    came, went = _moved(line, MoveKind.IN), _moved(line, MoveKind.OUT, MoveKind.COPY)
    order = np.lexsort((-step.bytes, -(came + went), -stalled))[:_TOP]
    chosen = [int(t) for t in order if step.large[t]]
    return [
        {
            "role": step.tags[t] or "untagged",
            "family": step.families[t],
            "block": int(step.source[t]),
            "origin": content.origins.get(step.block_of(TensorIndex(t))) or _NOT_RECORDED,
            "bytes": int(step.bytes[t]),
            "in": int(came[t]),
            "out": int(went[t]),
            "stall_us": float(stalled[t]),
            "first": int(step.first[t]),
            "last": int(step.last[t]),
        }
        for t in chosen
    ]


def _moved(line: Timeline, *kinds: MoveKind) -> Ints:
    moves = line.moves.only(*kinds)
    known = moves.tensor >= 0
    sums = np.zeros(line.step.n_tensors, np.int64)
    np.add.at(sums, moves.tensor[known], moves.pages[known] * PAGE_BYTES)
    return sums


def _roles(line: Timeline) -> list[str]:
    return [tag or "untagged" for tag in line.step.tags]


def _memory(line: Timeline, scale: _Scale) -> dict[str, Any]:
    """Return bytes on the device by role, and live bytes of the program, at some moments.

    Each short interval has the moment with the most bytes on the device.
    """
    changes, of = line.changes, _roles(line)
    names = list(dict.fromkeys(of))
    numbers = {name: number for number, name in enumerate(names)}
    place = np.array([*map(numbers.__getitem__, of), len(names)], np.int64)
    role = place[changes.tensor]  # OTHER is the last
    names += [SMALL]
    ticks = scale(changes.us)
    # The state after all changes of a moment.
    last = np.flatnonzero(np.append(np.diff(changes.us) > 0, True)) if len(ticks) else ticks
    total = np.cumsum(changes.pages)
    chosen = _peaks(ticks[last], total[last])
    at = last[chosen]
    series = []
    for number in range(len(names)):
        mine = np.cumsum(np.where(role == number, changes.pages, 0))[at]
        series.append(mine * PAGE_BYTES)
    used = [number for number, values in enumerate(series) if values.any()]
    order = sorted(used, key=lambda number: -int(series[number].max()))
    begin = np.searchsorted(line.start_us, changes.us[at], side="right") - 1
    alive = line.step.live_bytes[np.clip(begin, 0, None)]
    return {
        "t": _deltas(ticks[at]),
        "roles": [names[number] for number in order],
        "bytes": [_deltas(series[number] // PAGE_BYTES) for number in order],
        "alive": _deltas(alive // PAGE_BYTES),
        "page": PAGE_BYTES,
    }


def _peaks(ticks: Ints, values: Ints) -> Ints:
    """Return the index of the largest value in each of `_POINTS` intervals, and the first."""
    if len(ticks) <= _POINTS:
        return np.arange(len(ticks))
    group = ticks * _POINTS // (TICKS + 1)
    order = np.lexsort((values, group))
    ends = np.flatnonzero(np.append(np.diff(group[order]) > 0, True))
    return np.unique(np.concatenate(([0], order[ends])))


def _lanes(line: Timeline, waits: Sequence[Wait], scale: _Scale) -> list[dict[str, Any]]:
    names = _Names()
    step = line.step
    why: dict[int, tuple[float, str]] = {}
    for wait in waits:
        if wait.us > why.get(wait.op, (0.0, ""))[0]:
            what = "" if wait.why == "other" else f": {label(line, wait.tensor)}"
            why[wait.op] = wait.us, WHY[wait.why] + what
    stalled = np.flatnonzero(line.stall_us > 0)
    ops = names.of(step.op_names)
    lanes = [
        _lane("compute", scale(line.start_us), scale(line.end_us), ops, step.op_us),
        _lane(
            "stall",
            scale(line.wait_us[stalled]),
            scale(line.start_us[stalled]),
            names.of([why.get(op, (0.0, WHY["other"]))[1] for op in stalled.tolist()]),
            line.stall_us[stalled],
        ),
    ]
    transfers = {
        "in": (MoveKind.IN,),
        "out": (MoveKind.OUT, MoveKind.COPY),
        "host": (MoveKind.HOST,),
    }
    for name, kinds in transfers.items():
        moves = line.lane(*kinds)
        of = names.of([label(line, t) for t in moves.tensor.tolist()])
        lanes.append(
            _lane(name, scale(moves.start_us), scale(moves.end_us), of, moves.pages * PAGE_BYTES)
        )
    return [{**lane, "names": names.known} if lane["name"] == "compute" else lane for lane in lanes]


class _Names:
    """Numbers texts, so that the page contains each once."""

    def __init__(self) -> None:
        self.known: list[str] = []
        self._number: dict[str, int] = {}

    def of(self, texts: Sequence[str]) -> list[int]:
        """Return the number of each text."""
        for text in dict.fromkeys(texts):
            if text not in self._number:
                self._number[text] = len(self.known)
                self.known.append(text)
        return [*map(self._number.__getitem__, texts)]


def _lane(name: str, begin: Ints, end: Ints, of: Sequence[int], amount: Any) -> dict[str, Any]:
    """Return segments in order; neighbours that a screen cannot distinguish are merged.

    A segment has the name of its largest part, the sum of the amounts, and the number of parts.
    """
    numbers, weights = np.asarray(of, np.int64), np.asarray(amount, np.float64)
    first = _segments(begin, end)
    parts = np.diff(first, append=len(begin))
    by_amount = np.lexsort((-weights, np.repeat(np.arange(len(first)), parts)))
    sums = np.add.reduceat(weights, first) if len(first) else weights
    return {
        "name": name,
        "begin": _deltas(begin[first]),
        "length": (end[first + parts - 1] - begin[first]).tolist(),
        "of": numbers[by_amount[first]].tolist(),
        "amount": np.round(sums, 1).tolist() if name in ("compute", "stall")
        else sums.astype(np.int64).tolist(),
        "parts": parts.tolist(),
        "whole": len(begin),
    }  # fmt: skip


def _segments(begin: Ints, end: Ints) -> Ints:
    """Return the first part of each segment; on a lane both times ascend."""
    count = len(begin)
    if count <= _SEGMENTS:
        return np.arange(count)  # all of them can be shown
    width = TICKS // _SEGMENTS
    apart = (np.flatnonzero(begin[1:] - end[:-1] > width // 2) + 1).tolist()
    begins, ends = begin.tolist(), end.tolist()
    first, gap = [0], 0  # gap: which of `apart` is next
    while True:
        at = first[-1]
        while gap < len(apart) and apart[gap] <= at:
            gap += 1
        wide = bisect_right(ends, begins[at] + width, at + 1)
        at = min([wide, *apart[gap : gap + 1]])
        if at >= count:
            return np.array(first, np.int64)
        first.append(at)


def _map(content: Content, scale: _Scale) -> dict[str, Any]:
    """Return the tensors that move the most or are the largest, and where each is over time."""
    line, step = content.line, content.line.step
    came, went = _moved(line, MoveKind.IN), _moved(line, MoveKind.OUT, MoveKind.COPY)
    large = np.flatnonzero(step.large)
    weight = 4 * (came + went) + step.bytes  # tensors that never move tell little
    chosen = large[np.argsort(-weight[large], kind="stable")][:_ROWS]
    begins = np.isin(step.kind, (Kind.TRANSIENT, Kind.MADE))
    ends = np.isin(step.kind, (Kind.TRANSIENT, Kind.CARRIED))
    alive_from = np.where(begins, line.wait_us[step.first], 0.0)
    alive_to = np.where(ends, line.end_us[np.maximum(step.last, 0)], line.end_us[-1])
    roles = _roles(line)
    order = sorted(chosen.tolist(), key=lambda t: (roles[t], step.first[t], t))
    levels = _levels(line, set(order))
    rows = []
    for t in order:
        life = scale(np.array([alive_from[t], alive_to[t]])).tolist()
        us, pages = levels.get(t, (np.zeros(0), np.zeros(0, np.int64)))
        whole = max(int(step.bytes[t]) // PAGE_BYTES, 1)
        rows.append(_row(scale(us), level(pages, whole), life))
    return {
        "levels": _LEVELS,
        "left_out": len(large) - len(order),
        "rows": [
            {
                "role": roles[t],
                "name": _name(content, t),
                "bytes": int(step.bytes[t]),
                "in": int(came[t]),
                "out": int(went[t]),
                **row,
            }
            for t, row in zip(order, rows, strict=True)
        ],
    }


def level(pages: Ints, whole: int) -> Ints:
    """Return how full the device is of a tensor of `whole` pages, 0 to `_LEVELS`: all of it."""
    return np.where(pages > 0, np.clip(pages * _LEVELS // whole, 1, _LEVELS), 0)


def _levels(line: Timeline, chosen: set[int]) -> dict[int, tuple[Floats, Ints]]:
    """Return when the pages of each tensor on the device change, and how many they are then."""
    changes = line.changes
    wanted = np.isin(changes.tensor, list(chosen))
    tensor, us, pages = changes.tensor[wanted], changes.us[wanted], changes.pages[wanted]
    order = np.argsort(tensor, kind="stable")  # stable: each tensor's remain in time order
    tensor, us, pages = tensor[order], us[order], pages[order]
    found = {}
    edges = np.flatnonzero(np.diff(tensor, prepend=-2, append=-2))
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        total = np.cumsum(pages[begin:end])
        last = np.append(np.diff(us[begin:end]) > 0, True)  # after all changes of a moment
        found[int(tensor[begin])] = us[begin:end][last], total[last]
    return found


def _row(ticks: Ints, level: Ints, life: Sequence[int]) -> dict[str, Any]:
    """Return the runs of equal level within the life; those too short to see are left out."""
    runs: list[list[int]] = []
    shortest = TICKS // _RUNS // 4
    for at, to in _within(ticks.tolist(), level.tolist(), life):
        if runs and (runs[-1][1] == to or at - runs[-1][0] < shortest):
            if runs[-1][1] != to:
                runs[-1][1] = to
            continue
        runs.append([at, to])
    return {
        "life": list(life),
        "at": _deltas(np.array([run[0] for run in runs], np.int64)),
        "level": [run[1] for run in runs],
    }


def _within(
    ticks: Sequence[int], levels: Sequence[int], life: Sequence[int]
) -> Iterable[tuple[int, int]]:
    """Yield the changes during a tensor's life, beginning with its first state."""
    begin, end = life
    state = 0
    inside = []
    for at, to in zip(ticks, levels, strict=True):
        if at <= begin:
            state = to
        elif at < end:
            inside.append((at, to))
    yield begin, state
    yield from inside
