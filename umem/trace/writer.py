"""Writer of traces. It refuses events that the reader would refuse."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import TraceError
from .schema import KEYS, KIND, MAX_LINE, NAMES, Event, Header, Validator, check_header

_ALWAYS = ("name", "r", "w")  # are written, empty or not
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def to_json(event: Event) -> str:
    """Return the event's line without its end. Nothing is checked."""
    name = NAMES[type(event)]
    return _encode({"e": name, **_fields(event, name)})


def _fields(line: Header | Event, name: str) -> dict[str, Any]:
    fields = {key: getattr(line, field) for key, field in KEYS[name].items()}
    kept = {k: v for k, v in fields.items() if k in _ALWAYS or v not in (None, "", ())}
    if kept.get("device") == 0:  # nearly always
        del kept["device"]
    return {**kept, **(line.extra or {})}


class Writer:
    """A trace file being written; a context manager. A name that ends in .gz is compressed.

    Raises:
        TraceError: the file cannot be written, or an event is invalid at its place.
    """

    def __init__(self, path: str | os.PathLike[str], header: Header) -> None:
        self._path = Path(path)
        self._stack = contextlib.ExitStack()
        self._validator = Validator()
        self._number = 1
        try:
            check_header(header)
        except ValueError as error:
            raise TraceError(f"{path}:1: {error}") from None
        try:
            self._stream = self._open()
            self._put(_encode({"kind": KIND, **_fields(header, "header")}))
        except (OSError, ValueError) as error:
            self._fail(error)

    def write(self, event: Event) -> None:
        """Append one event."""
        self._number += 1
        try:
            self._validator.check(event)
        except ValueError as error:
            raise TraceError(f"{self._path}:{self._number}: {error}") from None
        try:
            self._put(to_json(event))
        except (OSError, ValueError) as error:
            self._fail(error)

    def close(self) -> None:
        """Finish the file; a no-op when it is finished."""
        try:
            self._stack.close()
        except OSError as error:
            self._fail(error)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> BinaryIO:
        file = self._stack.enter_context(self._path.open("wb"))
        if self._path.suffix != ".gz":
            return file
        # Without time and name, equal traces give equal files.
        packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0)
        self._stack.enter_context(packed)
        return self._stack.enter_context(io.BufferedWriter(packed, 1 << 16))

    def _put(self, line: str) -> None:
        data = line.encode() + b"\n"
        if len(data) > MAX_LINE:
            raise ValueError(f"line {self._number} would be longer than {MAX_LINE} bytes")
        self._stream.write(data)

    def _fail(self, error: OSError | ValueError) -> None:
        reason = error.strerror if isinstance(error, OSError) else None
        raise TraceError(f"{self._path}: {reason or error}") from None
