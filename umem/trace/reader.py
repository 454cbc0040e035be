"""Reader of traces, one event at a time: memory is linear in the live blocks, not in the file."""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..base.progress import Advance, ignore
from ..errors import TraceError, did_you_mean
from .schema import (
    KEYS,
    KIND,
    MAX_LINE,
    VERSION,
    Alloc,
    Event,
    Free,
    Header,
    Op,
    Step,
    Validator,
    check_header,
)

_log = logging.getLogger("umem")

_TOLD_LINES = 1 << 12  # lines between two reports of progress
_SALVAGE = " (`umem trace convert --partial` keeps its whole lines)"
_GZIP = b"\x1f\x8b"

# The object of a line. Parsers pop what they take; the rest becomes the event's `extra`.
_Line = dict[str, Any]
_Result = TypeVar("_Result")


def read(
    path: str | os.PathLike[str], *, partial: bool = False, advance: Advance = ignore
) -> tuple[Header, Iterator[Event]]:
    """Open a trace; return its header and the events as they are read. The file closes with them.

    A file with the magic number of gzip is decompressed, whatever its name.

    Args:
        partial: keep the whole lines of a file that is cut off, as a killed program leaves it, with
            a warning. Anything else that is wrong is still an error.
        advance: is called now and then with the number of bytes read since the last call.

    Raises:
        TraceError: `FILE:LINE: reason`; for an event the iterator raises it.
    """
    lines = _lines(Path(path), partial, advance)
    first = next(lines, None)  # started, `lines` closes its file when it is dropped
    if first is None:
        raise TraceError(f"{path}:1: the file is empty; a trace starts with a header line")
    header = _at(path, 1, _header, first)
    return header, _events(path, lines)


def _events(path: str | os.PathLike[str], lines: Iterator[bytes]) -> Iterator[Event]:
    check = Validator().check
    for number, line in enumerate(lines, 2):
        try:
            # The fast path for nearly all lines; other lines and errors take the slow one.
            text = line.decode()
            value, end = _scan(text, 0)
            event = _PARSERS[value.pop("e")](value) if text[end:] == "\n" else None
        except (StopIteration, LookupError, TypeError, ValueError, AttributeError, RecursionError):
            event = None
        if event is None:
            event = _at(path, number, _event, line)
        try:
            check(event)
        except ValueError as error:
            raise TraceError(f"{path}:{number}: {error}") from None
        yield event


def _lines(path: Path, partial: bool, advance: Advance) -> Iterator[bytes]:
    """Yield the lines with their ends, checking their length; `partial`: only the whole ones."""
    number, known = 1, 0
    try:
        with path.open("rb") as file, _unpacked(file, partial) as stream:
            while line := stream.readline(MAX_LINE + 1):
                if len(line) > MAX_LINE:
                    raise TraceError(f"{path}:{number}: the line is longer than {MAX_LINE} bytes")
                if partial and not line.endswith(b"\n"):
                    raise EOFError
                yield line
                number += 1
                known = known if number % _TOLD_LINES else _told(file, known, advance)
    except EOFError:
        if not partial:
            raise TraceError(
                f"{path}:{number}: cut off: the gzip data has no end{_SALVAGE}"
            ) from None
        _log.warning("%s is cut off; %d whole lines were read", path, number - 1)
    except (zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}:{number}: the gzip data is damaged: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except TraceError:  # a ValueError as well
        raise
    except ValueError as error:  # a path with a zero character
        raise TraceError(f"{path!s}: {error}") from None


def _told(file: io.BufferedReader, known: int, advance: Advance) -> int:
    """Report the bytes read beyond the position `known`; return the new position."""
    if not file.seekable():  # a pipe has no position
        return known
    place = file.tell()
    advance(place - known)
    return place


def _unpacked(file: io.BufferedReader, partial: bool) -> io.BufferedIOBase:
    if file.peek(2)[:2] != _GZIP:
        return file
    packed = gzip.GzipFile(fileobj=file)
    # Reading larger parts would lose the data just before the place where the file is cut off.
    return packed if partial else io.BufferedReader(packed, 1 << 16)


def _at(
    path: str | os.PathLike[str], number: int, parse: Callable[[_Line], _Result], line: bytes
) -> _Result:
    """Parse the line's object with `parse`; prefix an error with its file and line."""
    try:
        value = _decode(line.decode())
        if type(value) is not dict:
            raise ValueError("the line is not a JSON object")
        return parse(value)
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} of the line is not UTF-8"
    except json.JSONDecodeError as error:
        ends = f"; the file ends in this line: is it cut off?{_SALVAGE}"
        cut = "" if line.endswith(b"\n") else ends
        reason = f"not JSON: {error.msg} at column {error.colno}{cut}"
    except KeyError as error:
        reason = f"the key {error} is missing"
    except RecursionError:
        reason = "the line is nested too deeply"
    except ValueError as error:
        reason = str(error)
    raise TraceError(f"{path}:{number}: {reason}")


def _header(line: _Line) -> Header:
    if line.pop("kind", None) != KIND:
        raise ValueError(f'not a trace: the first line must have "kind": "{KIND}"')
    version = line.pop("v")
    if version != VERSION:  # checked first: the other keys may differ in another version
        check_header(Header(v=version))
    device, source, note = (line.pop(key, "") for key in ("device", "source", "note"))
    header = Header(device, source, note, version, line or None)
    check_header(header)
    return header


def _event(line: _Line) -> Event:
    name = line.pop("e", None)
    parse = _PARSERS.get(name) if isinstance(name, str) else None
    if parse is None:
        _no_event(name)
    return parse(line)


def _no_event(name: object) -> NoReturn:
    known = [name for name in KEYS if name != "header"]
    if name is None:
        raise ValueError(f'no event: the key "e" is missing; events are {", ".join(known)}')
    shown = repr(name) if len(repr(name)) <= 40 else f"{repr(name)[:37]}..."
    hint = did_you_mean(name, known) if isinstance(name, str) and len(name) < 40 else ""
    raise ValueError(f"the event {shown} is unknown{hint}; events are {', '.join(known)}")


def _alloc(line: _Line) -> Alloc:
    take = line.pop
    return Alloc(
        take("id"),
        take("bytes"),
        take("tag", ""),
        take("family", ""),
        take("device", 0),
        line or None,
    )


def _op(line: _Line) -> Op:
    take = line.pop
    reads, writes = take("r", ()), take("w", ())
    # Checked here too, because other types can have items as well.
    if (reads and type(reads) is not list) or (writes and type(writes) is not list):
        raise ValueError("r and w must be lists of ids")
    parts = take("parts", ())
    if parts and type(parts) is not list:
        raise ValueError("parts must be a list of numbers")
    return Op(
        take("name"),
        tuple(reads or ()),
        tuple(writes or ()),
        take("us", None),
        take("flops", None),
        take("i", None),
        take("family", ""),
        tuple(parts or ()),
        line or None,
    )


def _free(line: _Line) -> Free:
    return Free(line.pop("id"), line or None)


def _step(line: _Line) -> Step:
    return Step(line or None)


_PARSERS: dict[str, Callable[[_Line], Event]] = {
    "alloc": _alloc,
    "op": _op,
    "free": _free,
    "step": _step,
}


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


_decoder: Any = json.JSONDecoder(parse_constant=_constant)
_decode = _decoder.decode
_scan = _decoder.scan_once
