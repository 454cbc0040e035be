"""Rows for umem's transfers in the Chrome traces that torch.profiler writes.

Kineto records kernels and copies, but not the moves of managed memory. The runtime logs the times
of its transfers on the profile's clock; they are added to the file after torch has written it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.autograd.profiler import profile

from ...base.native import core
from ...base.replaced import Replaced
from ...base.units import format_bytes

_log = logging.getLogger("umem")
Transfer = tuple[int, str, int, int, int]  # device, what, bytes, begin and end in ns since 1970
# The rows of a device, and the kinds of each; other kinds are in the last row.
_ROWS = ("to the device", "to the host", "on the device")
_ROW_OF = {"bring in": 0, "send out": 1, "drop": 1, "write back": 1}
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d+)')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[\s*')
_HEAD = 4 << 20  # bytes searched for the start of the events


class ProfilerRows:
    """Adds the rows to torch's profiles, between its construction and `remove`.

    It patches the profiler that torch.profiler creates for each trace: a profile that was
    constructed earlier has rows too, and an export has them before the file is packed or moved.
    """

    def __init__(self) -> None:
        self._running: Any = None  # the profile of the log; torch has one at a time
        self._replaced = (
            Replaced(profile, "_start_trace", self._started),
            Replaced(profile, "__exit__", self._stopped),
        )

    def remove(self) -> None:
        """Restore torch's methods; profiles that ended keep their rows."""
        for replaced in self._replaced:
            replaced.remove()
        if self._running is not None:  # else the next session would log for nothing
            self._running = None
            core.take_transfer_log()

    def _started(self, start: Any, profiler: Any, *args: Any) -> Any:
        result = start(profiler, *args)
        try:
            core.start_transfer_log()
        except Exception as error:  # noqa: BLE001 - must not end torch's profile
            _log.warning("a profile has no rows for umem's transfers: %s", error)
        self._running = profiler
        return result

    def _stopped(self, stop: Any, profiler: Any, *args: Any) -> Any:
        if self._running is not profiler:
            return stop(profiler, *args)
        self._running = None
        try:
            return stop(profiler, *args)  # the device's work is done then
        finally:
            _keep(profiler)


def _keep(profiler: Any) -> None:
    """End the log, and have the profiler's export add it to the file."""
    transfers, more = core.take_transfer_log()
    if more:
        _log.warning(
            "%d transfers of a profile are not in its rows, which have %d: profile fewer steps",
            *(more, len(transfers)),
        )
    vars(profiler).pop("export_chrome_trace", None)  # the previous cycle's
    if transfers:
        # A weak reference: the profiler's events should be freed with their last user.
        known = weakref.ref(profiler)
        profiler.export_chrome_trace = functools.partial(_export, known, transfers)


def _export(
    profiler: Callable[[], Any], transfers: Sequence[Transfer], path: str, *args: Any, **kwargs: Any
) -> Any:
    known = profiler()
    result = type(known).export_chrome_trace(known, path, *args, **kwargs)
    try:
        add_rows(Path(path), transfers)
    except (OSError, ValueError) as error:  # the trace is intact, as torch wrote it
        _log.warning("umem's transfers are not in %s: %s", path, error)
    return result


def add_rows(path: Path, transfers: Sequence[Transfer]) -> None:
    """Add the transfers to a Chrome trace of torch.

    Raises:
        OSError, ValueError: the file cannot be rewritten, or is not in torch's form; it is
            unchanged.
    """
    path = path.resolve()  # keep a symbolic link
    if not os.path.isfile(path):  # reading a pipe would consume its data, or block
        raise ValueError("it is not a regular file")
    part = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    with path.open("rb") as source:
        head = source.read(_HEAD)
        base, events = _BASE.search(head), _EVENTS.search(head)
        if base is None or events is None:
            raise ValueError("this torch writes traces in another form")
        rows = ",\n".join(map(json.dumps, _drawn(transfers, int(base[1]))))
        comma = b"" if head[events.end() : events.end() + 1] == b"]" else b",\n"
        try:
            with part.open("wb") as target:
                shutil.copymode(path, part)
                target.write(head[: events.end()] + rows.encode() + comma + head[events.end() :])
                shutil.copyfileobj(source, target, _HEAD)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _drawn(transfers: Sequence[Transfer], base_ns: int) -> Iterator[dict[str, Any]]:
    for device in sorted({transfer[0] for transfer in transfers}):
        yield _named(device, 0, "process_name", f"umem, device {device}")
        for row, title in enumerate(_ROWS):
            yield _named(device, row, "thread_name", title)
    # A lane runs one transfer at a time, but the driver's times since the log's start have 24 bits:
    # one that seems to end after the next one's begin would be shown as its parent.
    following: dict[tuple[int, int], int] = {}
    for device, what, size, begin_ns, end_ns in sorted(transfers, key=_begin, reverse=True):
        row = _ROW_OF.get(what, len(_ROWS) - 1)
        end = min(end_ns, following.get((device, row), end_ns))
        following[device, row] = begin_ns
        yield {
            **_place(device, row),
            "ph": "X",
            "cat": "umem",
            "name": f"{what} {format_bytes(size)}",
            "ts": (begin_ns - base_ns) / 1e3,
            "dur": (end - begin_ns) / 1e3,
            "args": {"bytes": size},
        }


def _begin(transfer: Transfer) -> int:
    return transfer[3]


def _named(device: int, row: int, what: str, name: str) -> dict[str, Any]:
    return {**_place(device, row), "ph": "M", "name": what, "args": {"name": name}}


def _place(device: int, row: int) -> dict[str, Any]:
    # A string, as in Kineto for groups other than processes and GPUs, which are numbers.
    return {"pid": f"umem {device}", "tid": row}
