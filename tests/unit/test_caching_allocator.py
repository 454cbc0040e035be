"""The model of torch's caching allocator: its published rules, and no block over another."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umem.analysis import caching_allocator as model
from umem.analysis.caching_allocator import CachingAllocator
from umem.base.units import KIB, MIB
from umem.errors import OutOfMemoryError


@pytest.mark.parametrize(
    ("asked", "taken", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),  # rounded before it is compared
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
        (33 * MIB + 1, 33 * MIB + 512, 34 * MIB),
    ],
)
def test_sizes(asked: int, taken: int, segment: int) -> None:
    assert model.round_size(asked) == taken
    assert model.segment_size(taken) == segment
    torch = CachingAllocator()
    torch.malloc(asked)
    assert torch.reserved == segment
    assert torch.driver_calls == 1


def test_small_requests_share_a_segment_and_large_ones_never_enter_it() -> None:
    torch = CachingAllocator()
    blocks = [torch.malloc(512 * KIB) for _ in range(4)]
    assert torch.reserved == 2 * MIB
    assert [b - blocks[0] for b in blocks] == [0, 512 * KIB, MIB, 1536 * KIB]
    for block in blocks:
        torch.free(block)
    assert torch.largest_free == 2 * MIB  # joined again
    torch.malloc(MIB + 1)
    assert torch.reserved == 22 * MIB


def test_a_large_block_keeps_a_rest_of_up_to_a_mebibyte() -> None:
    torch = CachingAllocator()
    torch.free(torch.malloc(20 * MIB))
    torch.malloc(19 * MIB)
    assert torch.allocated == 20 * MIB  # nothing was split off
    other = CachingAllocator()
    other.free(other.malloc(20 * MIB))
    other.malloc(19 * MIB - 512)
    assert other.allocated == 19 * MIB - 512


def test_the_smallest_block_that_fits_is_used() -> None:
    torch = CachingAllocator()
    large, middle, small = (torch.malloc(size * MIB) for size in (40, 16, 12))
    for block in (large, middle, small):
        torch.free(block)
    assert torch.malloc(14 * MIB) == middle
    assert torch.malloc(12 * MIB) == small
    assert torch.malloc(30 * MIB) == large
    assert torch.driver_calls == 3


def test_at_the_limit_whole_free_segments_go_back_and_split_ones_stay() -> None:
    torch = CachingAllocator(limit=60 * MIB)
    split = torch.malloc(20 * MIB)
    torch.free(split)
    kept = torch.malloc(11 * MIB)  # leaves 9 MiB of the segment free
    assert kept == split
    torch.free(torch.malloc(30 * MIB))
    torch.malloc(40 * MIB)  # the 30 MiB must be released first
    assert torch.reserved == 60 * MIB
    with pytest.raises(OutOfMemoryError, match=r"allocate 10 MiB.*9 MiB reserved but unallocated"):
        torch.malloc(10 * MIB)
    assert torch.allocated == 51 * MIB


def test_expandable_segments_grow_instead_of_making_new_ones() -> None:
    torch = CachingAllocator(expandable=True)
    first = torch.malloc(30 * MIB)
    assert torch.reserved == 40 * MIB  # two granules of 20 MiB
    second = torch.malloc(25 * MIB)
    assert second == first + 30 * MIB  # the rest and one granule more
    assert torch.reserved == 60 * MIB
    torch.free(first)
    torch.free(second)
    assert torch.malloc(70 * MIB) == first
    assert torch.reserved == 80 * MIB


def test_expandable_segments_give_granules_back_from_between_live_blocks() -> None:
    torch = CachingAllocator(expandable=True, limit=100 * MIB)
    blocks = [torch.malloc(20 * MIB) for _ in range(5)]
    for block in blocks[1:4]:
        torch.free(block)
    torch.malloc(60 * MIB)  # at the same addresses
    assert torch.reserved == 100 * MIB
    fixed = CachingAllocator(limit=100 * MIB)
    blocks = [fixed.malloc(20 * MIB) for _ in range(5)]
    for block in blocks[1:4]:
        fixed.free(block)
    fixed.malloc(60 * MIB)  # whole segments were returned to the driver
    assert fixed.driver_calls == 5 + 3 + 1


def test_a_block_is_freed_once() -> None:
    torch = CachingAllocator()
    block = torch.malloc(1)
    torch.free(block)
    with pytest.raises(KeyError):
        torch.free(block)


_SIZES = st.one_of(st.integers(1, 3 * MIB), st.integers(1, 64 * MIB))
_ACTS = st.lists(st.tuples(st.booleans(), _SIZES, st.integers(0, 1 << 16)), max_size=60)


@settings(max_examples=100)
@given(acts=_ACTS, expandable=st.booleans(), limit=st.sampled_from([None, 100 * MIB, 200 * MIB]))
def test_live_blocks_are_apart_and_within_what_is_reserved(
    acts: list[tuple[bool, int, int]], expandable: bool, limit: int | None
) -> None:
    torch = CachingAllocator(expandable=expandable, limit=limit)
    live: dict[int, int] = {}
    for release, size, which in acts:
        if release and live:
            address = sorted(live)[which % len(live)]
            del live[address]
            torch.free(address)
            continue
        try:
            address = torch.malloc(size)
        except OutOfMemoryError:
            continue
        live[address] = size
        assert limit is None or torch.reserved <= limit
        ordered = sorted(live.items())
        for (low, bytes_), (high, _) in pairwise(ordered):
            assert low + bytes_ <= high
        assert sum(live.values()) <= torch.allocated <= torch.reserved <= torch.peak_reserved
    for address in live:
        torch.free(address)
    torch.empty_cache()
    assert torch.allocated == torch.reserved == torch.largest_free == 0


def test_expandable_segments_map_what_they_gave_back_for_the_next_request() -> None:
    torch = CachingAllocator(expandable=True, limit=100 * MIB)
    first, middle, last = (torch.malloc(size * MIB) for size in (15, 50, 15))
    assert torch.reserved == 80 * MIB
    torch.free(middle)  # its first and last 5 MiB share granules with the others
    with pytest.raises(OutOfMemoryError):
        torch.malloc(500 * MIB)
    assert torch.reserved == 40 * MIB
    assert torch.malloc(5 * MIB) == last - 5 * MIB  # those before it can grow
    torch.free(last - 5 * MIB)
    assert torch.malloc(50 * MIB) == middle
    assert torch.reserved == 80 * MIB
    assert torch.allocated == 80 * MIB
    assert first == middle - 15 * MIB


def test_a_request_larger_than_a_gap_goes_behind_it() -> None:
    torch = CachingAllocator(expandable=True, limit=120 * MIB)
    first, middle, last = (torch.malloc(size * MIB) for size in (15, 50, 15))
    torch.free(middle)
    assert torch.malloc(70 * MIB) == last + 15 * MIB  # 50 MiB are free before, 40 given back
    assert torch.reserved == 120 * MIB
    assert first < middle < last
