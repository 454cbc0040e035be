"""Out of memory with a third of it free: if blocks must be contiguous, and under umem."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.planned import MIB, Program, options

from umem import _core
from umem.analysis.caching_allocator import CachingAllocator
from umem.errors import OutOfMemoryError

BUDGET = 100 * MIB
BLOCKS = 25  # of 4 MiB: all of it
GONE = [i for i in range(BLOCKS) if i % 5 in (1, 3)]  # two of the five in each 20 MiB, not adjacent
LARGE = 12  # MiB


@pytest.fixture
def program() -> Iterator[Program]:
    _core.start(options(BUDGET, policy="lru"))
    made = Program()
    yield made
    made.clear()


@pytest.mark.parametrize("expandable", [False, True])
def test_a_caching_allocator_fails_with_two_fifths_free(expandable: bool) -> None:
    torch = CachingAllocator(expandable=expandable, limit=BUDGET)
    blocks = [torch.malloc(4 * MIB) for _ in range(BLOCKS)]
    for i in GONE:
        torch.free(blocks[i])
    assert BUDGET - torch.allocated == 40 * MIB
    assert torch.largest_free == 4 * MIB
    with pytest.raises(
        OutOfMemoryError, match=r"cannot allocate 12 MiB.*40 MiB reserved but unallocated"
    ):
        torch.malloc(LARGE * MIB)


def test_umem_serves_the_same_requests_and_moves_nothing(program: Program) -> None:
    for i in range(BLOCKS):
        program.take(f"b{i}", 4)
    for i in GONE:
        program.drop(f"b{i}")
    for i in range(3):
        program.take(f"large{i}", LARGE)
    for name in program.at:
        program.check(name)
    stats = _core.stats()
    assert stats["live_bytes"] == (60 + 3 * LARGE) * MIB
    assert stats["resident_bytes"] <= BUDGET
    assert stats["bytes_in"] == stats["bytes_out"] == stats["evictions"] == 0
    assert stats["ooms"] == 0
