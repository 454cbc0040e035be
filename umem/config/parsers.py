"""The types of option values, and the parser of each.

Every parser takes the text and raises ValueError with the reason; settings.py adds the option's
name and the allowed values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..base.units import FLOOR_PAGES, MIB, PAGE_BYTES, format_bytes, parse_bytes, parse_percent
from ..errors import did_you_mean, plain

_MIN_IMITATED = 64 * MIB
_TRUE = ("1", "on", "true", "yes")
_FALSE = ("0", "off", "false", "no")
_MIN_SECONDS, _MAX_SECONDS = 0.001, 1e6
SECONDS_ALLOWED = f"{_MIN_SECONDS:g} to {_MAX_SECONDS:.0f}"
SWITCH_ALLOWED = "1 or on, 0 or off"
_MOST_THREADS = 4096
COUNT_ALLOWED = f"a whole number from 0 to {_MOST_THREADS}"
WRITES_ALLOWED = "unlimited, or bytes a day such as 5TB/day"
SHARE_ALLOWED = "device, host, auto, or a percentage such as 50%"


@dataclass(frozen=True)
class Budget:
    """A device budget as written: `auto` if both are None; percent is a share of the device."""

    bytes: int | None = None
    percent: float | None = None

    @property
    def auto(self) -> bool:
        """True for `auto`: the free memory of the device."""
        return self.bytes is None and self.percent is None

    def __str__(self) -> str:
        if self.bytes is not None:
            return format_bytes(self.bytes)
        return "auto" if self.percent is None else f"{self.percent:g}%"


@dataclass(frozen=True)
class Device:
    """A device as written. `kind` is auto, cuda or soft; auto has no size, only soft a profile."""

    kind: str
    profile: str | None = None
    bytes: int | None = None

    def __str__(self) -> str:
        size = None if self.bytes is None else format_bytes(self.bytes).replace(" ", "")
        return ":".join(part for part in (self.kind, self.profile, size) if part is not None)


@dataclass(frozen=True)
class Share:
    """The share of an optimizer's updates that the host computes, from 0 to 1; None is `auto`."""

    value: float | None = 0.0

    def __str__(self) -> str:
        known = {None: "auto", 0.0: "device", 1.0: "host"}
        return known[self.value] if self.value in known else f"{(self.value or 0) * 100:g}%"


@dataclass(frozen=True)
class Disk:
    """A folder on a disk for evicted memory, and the most bytes there; None: no limit."""

    folder: Path
    bytes: int | None = None

    def __str__(self) -> str:
        limit = "" if self.bytes is None else f":{format_bytes(self.bytes).replace(' ', '')}"
        return f"{self.folder}{limit}"


def parse_switch(text: str) -> bool:
    """Parse a switch; True means on."""
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError(f"{text!r} is neither on nor off")


def parse_budget(text: str) -> Budget:
    """Parse `auto`, bytes above 0, or a percentage above 0 and up to 100."""
    if text.strip().lower() == "auto":
        return Budget()
    percent = parse_percent(text) if "%" in text else None
    if percent is None:
        return Budget(bytes=parse_bytes(text, least=1))
    if not 0 < percent <= 100:
        raise ValueError(f"{text!r} is not a percentage above 0 and up to 100")
    return Budget(percent=percent)


def parse_host_budget(text: str) -> int | None:
    """Parse bytes above 0; None stands for `auto` and 0 for `unlimited`."""
    word = text.strip().lower()
    if word == "auto":
        return None
    return 0 if word == "unlimited" else parse_bytes(text, least=1)


def parse_share(text: str) -> Share:
    """Parse `auto`, `device`, `host`, or a percentage from 0 to 100."""
    word = text.strip().lower()
    if word in ("auto", "device", "host"):
        return Share({"auto": None, "device": 0.0, "host": 1.0}[word])
    percent = parse_percent(text)
    if percent is None or not 0 <= percent <= 100:
        raise ValueError(f"{text!r} is neither a place nor a percentage from 0 to 100")
    return Share(percent / 100)


def parse_seconds(text: str) -> float:
    """Parse seconds; 0 stands for `off`."""
    if text.strip().lower() == "off":
        return 0.0
    seconds = float(text)
    if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
        raise ValueError(f"{text!r} is not a number of seconds from {SECONDS_ALLOWED}")
    return seconds


def parse_device(text: str) -> Device:
    """Parse `auto`, `cuda[:SIZE]` or `soft[:PROFILE][:SIZE]`."""
    kind, *parts = text.strip().split(":")
    if kind in ("auto", "cuda") and not parts:
        return Device(kind)
    if kind == "cuda" and len(parts) == 1 and not parts[0].isdigit():  # cuda:1 is not a size
        return _imitated(parts[0])
    if kind == "soft" and len(parts) <= 2:
        return _soft(parts)
    raise ValueError(f"{text!r} is not a device")


def parse_path(text: str) -> Path:
    """Parse a path; `~` is the home directory."""
    if not text.strip():
        raise ValueError("the path is empty")
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:  # unknown user, or HOME is not set and this user has no passwd entry
        raise ValueError(f"the directory {plain(path.parts[0])} is not known") from None


def parse_disk(text: str) -> Disk | None:
    """Parse a folder, or a folder, a colon and bytes; None stands for `off`.

    The folder is that of now, whatever folder the program works in later.
    """
    if text.strip().lower() == "off":
        return None
    folder, _, limit = text.rpartition(":")
    if not folder or "/" in limit:
        return Disk(parse_path(text).absolute())
    return Disk(parse_path(folder).absolute(), parse_bytes(limit, least=PAGE_BYTES))


def parse_writes(text: str) -> int:
    """Parse bytes a day, such as `5TB/day`; 0 stands for `unlimited`."""
    word = text.strip().lower()
    if word == "unlimited":
        return 0
    count, _, time = word.rpartition("/")
    if time.strip() != "day":
        raise ValueError(f"{text!r} is not a number of bytes a day")
    return parse_bytes(count, least=1)


def parse_trace(text: str) -> Path | None:
    """Parse the name of a trace file; None stands for `off`."""
    if text.strip().lower() == "off":
        return None
    path = parse_path(text)
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"{text!r} ends neither in .jsonl nor in .jsonl.gz")
    return path


def parse_top(text: str) -> bool | Path:
    """Parse on, off, or the path of a socket, which contains a `/`."""
    try:
        return parse_switch(text)
    except ValueError:
        if "/" in text:
            return parse_path(text).absolute()  # whatever folder the program works in later
        raise


def parse_count(text: str) -> int:
    """Parse a number of threads."""
    word = text.strip()
    if not word.isdecimal() or int(word) > _MOST_THREADS:
        raise ValueError(f"{text!r} is not {COUNT_ALLOWED}")
    return int(word)


def parse_name(text: str) -> str:
    """Parse a name; the caller checks it against the allowed names."""
    name = text.strip()
    if not name:
        raise ValueError("the name is empty")
    return name


def choice(*names: str) -> Callable[[str], str]:
    """Return a parser that accepts one of `names`."""

    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in names:
            raise ValueError(f"{text!r} is not an allowed value{did_you_mean(word, names)}")
        return word

    return parse


def _imitated(size: str) -> Device:
    count = parse_bytes(size, least=1)
    if count < _MIN_IMITATED:
        least = format_bytes(_MIN_IMITATED)
        raise ValueError(f"a GPU of {format_bytes(count)} is below {least}")
    return Device("cuda", bytes=count)


def _soft(parts: list[str]) -> Device:
    size: int | None = None
    if parts and (parts[-1][:1].isdigit() or parts[-1].startswith("-")):
        size = parse_bytes(parts.pop(), least=1)
        if size < FLOOR_PAGES * PAGE_BYTES:
            least = format_bytes(FLOOR_PAGES * PAGE_BYTES)
            raise ValueError(f"a software device of {format_bytes(size)} is below {least}")
    if len(parts) > 1:
        raise ValueError(f"{parts[1]!r} is not the size of a software device")
    if parts and not parts[0]:
        raise ValueError("the profile's name is empty")
    return Device("soft", profile=parts[0] if parts else None, bytes=size)
