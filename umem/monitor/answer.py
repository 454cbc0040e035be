"""The answer of a process to `umem top`: a line of JSON, from a process that may be hostile."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from ..base.stats import Stats
from ..base.version import __version__
from ..errors import plain

MAX_BYTES = 1 << 20
_MAX_ERROR = 300  # characters that are shown
_MAX_COUNT = 1 << 63
_TEXTS = ("umem", "program", "device", "policy", "allocator")
_STATS = {field.name for field in dataclasses.fields(Stats)}
_OF_A_TAG = {"blocks", "bytes", "resident_bytes"}


def parse(line: bytes) -> dict[str, Any]:
    """Return the figures of an answer: all values that `umem top` shows, with their types.

    Raises:
        ValueError: not such an answer, or the reason why there is none; without control characters.
    """
    if not line.endswith(b"\n"):
        raise ValueError("the answer was cut off")
    try:
        figures = json.loads(line)
    except RecursionError:
        raise ValueError("the answer is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the answer is not JSON: {plain(str(error))}") from None
    if isinstance(figures, dict) and "error" in figures:
        raise ValueError(plain(str(figures["error"])[:_MAX_ERROR]))
    if not _is_answer(figures):
        raise ValueError(f"not an answer of umem {__version__}")
    found: dict[str, Any] = figures
    return found


def _is_answer(figures: object) -> bool:
    if not isinstance(figures, Mapping):
        return False
    tags = figures.get("tags")
    return (
        all(isinstance(figures.get(name), str) for name in _TEXTS)
        and _is_count(figures.get("pid"))
        and _is_time(figures.get("time"))
        and _are_counts(figures.get("stats"), _STATS)
        and isinstance(tags, Mapping)
        and all(_are_counts(row, _OF_A_TAG) for row in tags.values())
    )


def _are_counts(row: object, names: set[str]) -> bool:
    return (
        isinstance(row, Mapping) and names <= row.keys() and all(_is_count(n) for n in row.values())
    )


def _is_time(value: object) -> bool:
    return type(value) is float and math.isfinite(value)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT
