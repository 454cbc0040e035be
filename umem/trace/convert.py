"""Conversion between trace formats."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ..base.paths import replacing
from ..errors import TraceError
from . import perfetto, snapshot_writer, torch_snapshot
from .reader import read
from .schema import Event, Header
from .step_builder import StepBuilder
from .writer import Writer

_DRAWN = ".json"


def _write_trace(path: Path, header: Header, events: Iterable[Event]) -> None:
    with Writer(path, header) as writer:
        for event in events:
            writer.write(event)


def _draw(path: Path, header: Header, events: Iterable[Event]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        perfetto.write(stream, [perfetto.Shown("umem trace", header, events)])


_WRITERS: dict[str, Callable[[Path, Header, Iterable[Event]], None]] = {
    ".jsonl": _write_trace,
    ".jsonl.gz": _write_trace,
    _DRAWN: _draw,
    ".pickle": snapshot_writer.write,
}
FORMS = tuple(_WRITERS)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    last_step: bool = False,
    gpu: int | None = None,
    partial: bool = False,
) -> None:
    """Convert `source`, a trace or a memory snapshot of torch, to the format of `target`'s suffix.

    Args:
        source: a .jsonl or .jsonl.gz file, told by its content, or a pickled snapshot.
        target: .jsonl or .jsonl.gz, a trace; .json, Chrome trace JSON; .pickle, a snapshot of
            torch's memory. Replaced once all is written.
        last_step: only the last complete step, with the blocks that are live at its start.
        gpu: the device to take from a snapshot of several.
        partial: keep the whole lines of a trace that is cut off.

    Raises:
        TraceError: the source is malformed, or the target cannot be written.
    """
    source, target = Path(source), Path(target)
    form = next((form for form in FORMS if target.name.endswith(form)), None)
    if form is None:
        raise TraceError(f"{target}: not a known format; the name must end in {', '.join(FORMS)}")
    header, events = _open(source, gpu, partial)
    if last_step:
        events = _last_step(source, events)
    with replacing(target, TraceError) as part:
        _WRITERS[form](part, header, events)


def merge(
    sources: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    last_step: bool = False,
    partial: bool = False,
) -> None:
    """Draw several traces, such as those of all ranks, into one Chrome trace JSON.

    Args:
        sources: traces; each has a group of rows, named after its file, or its path where the
            names of files are alike.
        target: .json. Replaced once all is written.
        last_step: only the last complete step of each.
        partial: keep the whole lines of traces that are cut off.

    Raises:
        TraceError: a source is malformed, or the target cannot be written.
    """
    target = Path(target)
    if not target.name.endswith(_DRAWN):
        raise TraceError(
            f"{target}: several traces become one picture only; the name must end in {_DRAWN}"
        )
    paths = [Path(source) for source in sources]
    alike = len({path.name for path in paths}) < len(paths)
    traces = []
    for source in paths:
        header, events = _open(source, None, partial)
        # Many ranks' files would be too many open ones; a pipe, and a snapshot, is read once.
        if os.path.isfile(source) and not _is_snapshot(source):
            events = _read_later(source, partial)
        events = _last_step(source, events) if last_step else events
        traces.append(perfetto.Shown(str(source) if alike else source.name, header, events))
    with replacing(target, TraceError) as part, part.open("w", encoding="utf-8") as stream:
        perfetto.write(stream, traces)


def _is_snapshot(source: Path) -> bool:
    """Return whether it is a pickle; a pipe is read once, as a trace."""
    if not os.path.isfile(source):
        return False
    try:
        with source.open("rb") as file:
            return file.read(1) == torch_snapshot.PICKLE
    except OSError as error:
        raise TraceError(f"{source}: {error.strerror}") from None


def _read_later(source: Path, partial: bool) -> Iterator[Event]:
    yield from read(source, partial=partial)[1]


def _open(source: Path, gpu: int | None, partial: bool) -> tuple[Header, Iterator[Event]]:
    if _is_snapshot(source):
        return torch_snapshot.read(source, gpu)
    if gpu is not None:
        raise TraceError(f"{source}: --gpu is for memory snapshots; leave it out")
    return read(source, partial=partial)


def _last_step(source: Path, events: Iterable[Event]) -> Iterator[Event]:
    builder = StepBuilder()
    for event in events:
        builder.add(event)
    if builder.steps == 0:
        raise TraceError(f"{source}: no step: the trace has no op, or its last event is no `step`")
    return builder.events()
