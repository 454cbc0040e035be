"""Rows for umem's transfers in the Chrome traces that torch.profiler writes.

Kineto records kernels and copies, but not what moves managed memory. The runtime logs when its
transfers were under way, on the clock of the profile; they are put into the file once torch has
written it.
"""

from __future__ import annotations

import functools
import gzip
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.profiler.profiler import _KinetoProfile

from ...base.native import core
from ...base.units import format_bytes

_log = logging.getLogger("umem")
Transfer = tuple[int, str, int, int, int]  # device, what, bytes, begin and end in ns since 1970
# The rows of a device, and what is in which; whatever else there is, is in the last one.
_ROWS = ("to the device", "to the host", "on the device")
_ROW_OF = {"bring in": 0, "send out": 1, "drop": 1, "write back": 1}
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d+)')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[\s*')
_HEAD = 4 << 20  # bytes before the events that are looked through


class ProfilerRows:
    """Puts the rows into torch's profiles, from its construction until `remove`."""

    def __init__(self) -> None:
        self._before = {
            name: getattr(_KinetoProfile, name) for name in ("start_trace", "stop_trace")
        }
        start, stop = self._before["start_trace"], self._before["stop_trace"]

        @functools.wraps(start)
        def started(profile: Any) -> Any:
            result = start(profile)
            core.start_transfer_log()
            return result

        @functools.wraps(stop)
        def stopped(profile: Any) -> Any:
            result = stop(profile)  # what the device was given is done then
            transfers, more = core.take_transfer_log()
            if more:
                _log.warning(
                    "%d transfers of a profile are not in its rows, which have %d: profile fewer "
                    "steps",
                    *(more, len(transfers)),
                )
            export = type(profile).export_chrome_trace
            profile.export_chrome_trace = functools.partial(_export, export, profile, transfers)
            return result

        self._put({"start_trace": started, "stop_trace": stopped})

    def remove(self) -> None:
        """Give torch its own methods back; profiles that ended keep their rows."""
        self._put(self._before)

    def _put(self, methods: dict[str, Callable[..., Any]]) -> None:
        for name, method in methods.items():
            setattr(_KinetoProfile, name, method)


def _export(
    export: Callable[..., Any],
    profile: Any,
    transfers: Sequence[Transfer],
    path: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    result = export(profile, path, *args, **kwargs)
    if transfers and not add_rows(Path(path), transfers):
        _log.warning(
            "umem's transfers are not in %s, because this torch writes traces in another form", path
        )
    return result


def add_rows(path: Path, transfers: Sequence[Transfer]) -> bool:
    """Put the transfers into a Chrome trace of torch, .json or .json.gz.

    Returns:
        Whether the file has the form that torch's have; else it stays as it is.
    """
    opened: Any = gzip.open if path.name.endswith(".gz") else open
    part = path.with_name(f".{os.getpid()}.{path.name}")  # the suffix is kept
    with opened(path, "rb") as source:
        head = source.read(_HEAD)
        base, events = _BASE.search(head), _EVENTS.search(head)
        if base is None or events is None:
            return False
        rows = ",\n".join(map(json.dumps, _drawn(transfers, int(base[1]))))
        comma = b"" if head[events.end() : events.end() + 1] == b"]" else b",\n"
        try:
            with opened(part, "wb") as target:
                target.write(head[: events.end()] + rows.encode() + comma + head[events.end() :])
                while piece := source.read(_HEAD):
                    target.write(piece)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return True


def _drawn(transfers: Sequence[Transfer], base_ns: int) -> Iterator[dict[str, Any]]:
    for device in sorted({transfer[0] for transfer in transfers}):
        yield _named(device, 0, "process_name", f"umem, device {device}")
        for row, title in enumerate(_ROWS):
            yield _named(device, row, "thread_name", title)
    for device, what, size, begin_ns, end_ns in sorted(transfers, key=lambda each: each[3]):
        yield {
            **_place(device, _ROW_OF.get(what, len(_ROWS) - 1)),
            "ph": "X",
            "cat": "umem",
            "name": f"{what} {format_bytes(size)}",
            "ts": (begin_ns - base_ns) / 1e3,
            "dur": (end_ns - begin_ns) / 1e3,
            "args": {"bytes": size},
        }


def _named(device: int, row: int, what: str, name: str) -> dict[str, Any]:
    return {**_place(device, row), "ph": "M", "name": what, "args": {"name": name}}


def _place(device: int, row: int) -> dict[str, Any]:
    # A text, as Kineto has for groups that are no process: numbers are processes and GPUs.
    return {"pid": f"umem {device}", "tid": row}
