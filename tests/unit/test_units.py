"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umem.base.units import (
    GIB,
    KIB,
    MIB,
    PAGE_BYTES,
    format_bytes,
    parse_bytes,
    parse_percent,
    staging_bytes,
    with_staging,
)  # fmt: skip


@given(st.integers(1, 1 << 44))
def test_a_budget_with_staging_leaves_what_was_asked_for(count: int) -> None:
    whole = with_staging(count)
    assert whole % PAGE_BYTES == 0
    assert 0 <= whole - staging_bytes(whole) - count < 2 * PAGE_BYTES


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("17B", 17),
        ("8GiB", 8 * GIB),
        (" 512 MiB ", 512 * MIB),
        ("512mib", 512 * MIB),
        ("1.5GB", 1_500_000_000),
        ("1.5KiB", 1536),
        ("2kB", 2000),
        ("8G", 8 * GIB),
        ("3k", 3 * KIB),
        ("1T", 1024 * GIB),
        ("9223372036854775807", (1 << 63) - 1),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "banana", "12 parsecs", "-1", "-1GiB", "1e9", "0x10", "8 G iB", "GiB", "1.5", "0.5B",
     "1,5GB", "8EiB", "9223372036854775808", "8388608TiB", "٣MiB", "1_000", "nan", "inf"],
)  # fmt: skip
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is"):
        parse_bytes(text)


@given(st.integers(0, 10**6), st.sampled_from(["", "KiB", "MiB", "GiB", "kb", "MB", "g"]))
def test_whole_numbers_scale_exactly(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == number * parse_bytes(f"1{unit}")


@given(st.integers(0, 1 << 50) | st.integers(0, 1023).map(lambda n: n * MIB))
def test_what_is_formatted_reads_back_closely(count: int) -> None:
    back = parse_bytes(format_bytes(count))
    assert abs(back - count) <= count * 0.005 + 1  # a whole number of bytes is cut off
    if count % MIB == 0 and count < GIB:
        assert back == count


def test_percentages() -> None:
    assert parse_percent("80%") == 80.0
    assert parse_percent(" 12.5 % ") == 12.5
    assert parse_percent("80") is None
    assert parse_percent("-5%") is None
    assert parse_percent("%") is None


def test_format() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(8 * GIB) == "8 GiB"
    assert format_bytes(1536 * MIB) == "1.50 GiB"
    assert format_bytes(1500) == "1.46 KiB"
