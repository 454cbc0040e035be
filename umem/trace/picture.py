"""A picture of a trace's live bytes over time, by tag."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..base import extras
from ..base.units import GIB, MIB, format_bytes
from .info import LiveBytes
from .schema import Alloc, Event, Free, Header, Op

FORMS = (".svg", ".png", ".pdf")
_POINTS = 2000  # more cannot be told apart in a picture
_Point = tuple[float, dict[str, int]]  # µs, and bytes by tag


def write(path: Path, header: Header, events: Iterable[Event]) -> None:
    """Draw live bytes over the operators' time, stacked by tag; the suffix gives the format.

    An operator is drawn with what is live at its peak, and one without a time is 1 µs long.

    Raises:
        NotSupportedError: matplotlib is not installed.
    """
    module = extras.load("matplotlib.figure", "a picture", extras.DEMO)
    figure = module.Figure(figsize=(9, 4), layout="constrained")
    points = _thinned(_points(events))
    peaks: dict[str, int] = {}
    for _, by_tag in points:
        for tag, count in by_tag.items():
            peaks[tag] = max(peaks.get(tag, 0), count)
    tags = sorted(peaks, key=lambda tag: -peaks[tag])
    most = max((sum(by_tag.values()) for _, by_tag in points), default=0)
    unit, name = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    axes: Any = figure.subplots()
    times = [us / 1e3 for us, _ in points]
    rows = [[by_tag.get(tag, 0) / unit for _, by_tag in points] for tag in tags]
    if rows:
        axes.stackplot(times, rows, labels=[tag or "untagged" for tag in tags], step="post")
        axes.legend(loc="upper left", fontsize="small")
    axes.set_title(f"live bytes, at most {format_bytes(most)}")
    axes.set_xlabel("time of operators (ms)")
    axes.set_ylabel(name)
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=150, metadata={"Title": header.note or "umem trace"})


def _points(events: Iterable[Event]) -> list[_Point]:
    memory = LiveBytes()
    points: list[_Point] = []
    now = 0.0
    for event in events:
        if type(event) is Alloc:
            memory.alloc(event)
        elif type(event) is Free:
            memory.free(event.id)
        elif type(event) is Op:
            points.append((now, dict(memory.peak_by_tag)))
            now += 1.0 if event.us is None else event.us
            memory.restart_peak()
    points.append((now, dict(memory.by_tag)))
    return points


def _thinned(points: list[_Point]) -> list[_Point]:
    """Keep of each part of the time the point with the most bytes, so that no peak is lost."""
    if len(points) <= _POINTS:
        return points
    end = points[-1][0] or 1.0
    kept: dict[int, _Point] = {}
    for point in points:
        part = min(int(point[0] / end * _POINTS), _POINTS - 1)
        if part not in kept or sum(kept[part][1].values()) < sum(point[1].values()):
            kept[part] = point
    return list(kept.values())
