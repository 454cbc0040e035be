"""Export of a trace as Chrome trace JSON, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

from .info import LiveBytes
from .schema import Alloc, Event, Free, Header, Op, Step

UNKNOWN_US = 1.0  # drawn length of an op without a time
_STEPS, _OPS = 1, 2  # rows


class Shown(NamedTuple):
    """A trace to draw, and the name of its group of rows."""

    name: str
    header: Header
    events: Iterable[Event]


def write(stream: TextIO, traces: Sequence[Shown]) -> None:
    """Write the events, one per line, without keeping them in memory.

    Each trace has its own group of rows. All begin at 0, because a trace has no clock: operators
    follow each other without gaps.
    """
    about = [{"device": h.device, "source": h.source, "note": h.note} for _, h, _ in traces]
    other = json.dumps(about[0] if len(about) == 1 else {"traces": about})
    stream.write(f'{{"otherData":{other},"traceEvents":[\n')
    last = len(traces)
    for process, (name, _, events) in enumerate(traces, 1):
        for row, title in ((_STEPS, "steps"), (_OPS, "ops")):
            named = {"ph": "M", "pid": process, "tid": row, "name": "thread_name"}
            stream.write(json.dumps({**named, "args": {"name": title}}) + ",\n")
        for drawn in _Drawing(process).draw(events):
            stream.write(json.dumps(drawn) + ",\n")
        group = {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
        stream.write(json.dumps(group) + (",\n" if process < last else "\n]}\n"))


class _Drawing:
    def __init__(self, process: int) -> None:
        self._process = process
        self._memory = LiveBytes()
        self._now = 0.0
        self._step_begin = 0.0
        self._steps = self._ops = 0  # ops of the step so far
        self._between = True  # frees until the next allocation belong before the next op
        self._shown: dict[str, int] = {}

    def draw(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        for event in events:
            if type(event) is Alloc:
                self._memory.alloc(event)
                self._between = False
            elif type(event) is Free:
                self._memory.free(event.id)
                if self._between:
                    self._memory.restart_peak()
            elif type(event) is Op:
                yield from self._op(event)
            elif type(event) is Step:
                yield from self._step()
        yield from self._counter(dict(self._memory.by_tag))

    def _op(self, op: Op) -> Iterator[dict[str, Any]]:
        # The op includes what it allocated and freed inside.
        yield from self._counter(dict(self._memory.peak_by_tag))
        us = UNKNOWN_US if op.us is None else op.us
        args = {"r": op.reads, "w": op.writes, "i": op.index, "us": op.us, "flops": op.flops}
        known = {key: value for key, value in args.items() if value is not None}
        yield self._slice(_OPS, op.name, self._now, us, cat=op.family or "op", args=known)
        self._now += us
        self._ops += 1
        yield from self._counter(dict(self._memory.by_tag))
        self._memory.restart_peak()
        self._between = True

    def _step(self) -> Iterator[dict[str, Any]]:
        begin, self._step_begin = self._step_begin, self._now
        if not self._ops:  # the blocks that were live when a recording began
            return
        self._ops = 0
        yield self._slice(_STEPS, f"step {self._steps}", begin, self._now - begin)
        self._steps += 1

    def _slice(
        self, row: int, name: str, begin: float, us: float, **more: object
    ) -> dict[str, Any]:
        # Whole nanoseconds, as viewers have them: a slice that ended after the next one's begin
        # would contain it.
        start = round(begin, 3)
        end = round(begin + us, 3)
        place = {"ph": "X", "pid": self._process, "tid": row}
        place |= {"ts": start, "dur": round(end - start, 3)}
        return {**place, "name": name, **more}

    def _counter(self, by_tag: dict[str, int]) -> Iterator[dict[str, Any]]:
        if by_tag == self._shown:
            return
        # A tag without bytes is drawn as 0 once; afterwards its line can be left out.
        values = {tag or "untagged": 0 for tag in self._shown}
        values |= {tag or "untagged": count for tag, count in by_tag.items()}
        self._shown = by_tag
        place = {"ph": "C", "pid": self._process, "ts": self._now, "name": "live bytes"}
        yield {**place, "args": dict(sorted(values.items()))}
