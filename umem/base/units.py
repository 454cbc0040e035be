"""Sizes: the units in which memory moves, and the parsers of sizes and percentages."""

from __future__ import annotations

import re
from fractions import Fraction

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

PAGE_BYTES = 2 * MIB  # the driver's unit of eviction, and the software device's frame
DAY_US = 86_400e6
PIECE_BYTES = 64 * MIB  # larger blocks are moved in pieces of this size
FLOOR_PAGES = 4  # the most pages that one instruction of a thread can need at once
_MIN_STAGING, _MAX_STAGING = 2, 64  # pages; two in flight each way keep a disk busy

# A bare K, M, G or T is binary, as in the memory options of containers and batch schedulers.
_FACTORS = {
    "": 1,
    "b": 1,
    **{f"{p}{s}": 1 << (10 * i) for i, p in enumerate("kmgt", 1) for s in ("", "ib")},
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)},
}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%", re.ASCII)
_LARGEST = (1 << 63) - 1  # the native side counts in 64 bits, signed

BYTES_ALLOWED = "bytes such as 8GiB, 512MiB, 1.5GB or a plain whole number"


def staging_bytes(budget: int) -> int:
    """Return the share of a budget that holds pages on their way to and from a disk."""
    return PAGE_BYTES * min(max(budget // PAGE_BYTES // 16, _MIN_STAGING), _MAX_STAGING)


def with_staging(count: int) -> int:
    """Return a budget that leaves `count` bytes beside its `staging_bytes`."""
    pages = -(-count // PAGE_BYTES)
    return PAGE_BYTES * (pages + min(max(pages // 15, _MIN_STAGING), _MAX_STAGING))


def parse_bytes(text: str, *, least: int = 0) -> int:
    """Parse a number of bytes: `512MiB`, `1.5GB`, `8G` (binary) or `4096`.

    Args:
        text: the number with its unit.
        least: the least number, such as 1 if zero bytes make no sense.

    Raises:
        ValueError: not a size, negative, below `least`, a fraction of a byte, or more than
            2**63 - 1.
    """
    if text.strip().startswith("-"):
        raise ValueError(f"{text!r} is negative")
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in _FACTORS:
        raise ValueError(f"{text!r} is not a number of bytes")
    exact = Fraction(match[1]) * _FACTORS[match[2].lower()]
    if exact.denominator != 1 and match[2].lower() in ("", "b"):
        raise ValueError(f"{text!r} is a fraction of a byte")
    if exact > _LARGEST:
        raise ValueError(f"{text!r} is more than any machine has")
    if exact < least:
        low = f"less than {format_bytes(least)}" if least > 1 else "not above 0"
        raise ValueError(f"{text!r} is {low}")
    return int(exact)


def parse_percent(text: str) -> float | None:
    """Return the number before the `%` of `80%`; None if `text` is not a percentage."""
    match = _PERCENT.fullmatch(text.strip())
    return None if match is None else float(match[1])


def format_bytes(count: int) -> str:
    """Format `count` bytes: `8 GiB`, or with two decimals if it is not whole: `1.50 GiB`."""
    for factor, unit in ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= factor:
            whole = count % factor == 0
            return f"{count // factor} {unit}" if whole else f"{count / factor:.2f} {unit}"
    return f"{count} B"
