"""Synthetic traces have the patterns of use with known transfers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from support.synthetic import chain, cyclic, random_trace, training

from umem.trace.schema import Alloc, Event, Free, Op, Validator


def reloads(events: Iterable[Event], capacity: int) -> int:
    """Bytes that LRU loads again: first touches are free, freed tensors leave immediately."""
    size: dict[int, int] = {}
    resident: dict[int, int] = {}  # last use
    seen: set[int] = set()
    total = clock = 0
    for event in events:
        if isinstance(event, Alloc):
            size[event.id] = event.bytes
        elif isinstance(event, Free):
            resident.pop(event.id, None)
        elif isinstance(event, Op):
            now = {*event.reads, *event.writes}
            clock += 1
            for block in sorted(now):
                if block not in resident and block in seen:
                    total += size[block]
                seen.add(block)
                resident[block] = clock
            while sum(size[b] for b in resident) > capacity:
                victim = min((b for b in resident if b not in now), key=lambda b: resident[b])
                del resident[victim]
    return total


@pytest.mark.parametrize(
    ("n", "size", "capacity", "expected"),
    [(10, 16, 48, 112), (10, 16, 64, 96), (10, 16, 96, 64), (20, 8, 64, 96), (30, 4, 40, 80)],
)
def test_the_chain_reloads_what_its_closed_form_says(
    n: int, size: int, capacity: int, expected: int
) -> None:
    assert expected == n * size - capacity
    assert reloads(chain(n, size), capacity) == expected


def test_a_cyclic_sweep_thrashes_lru() -> None:
    assert reloads(cyclic(12, 20, 1), 11) == 19 * 12
    assert reloads(cyclic(12, 20, 1), 12) == 0


@pytest.mark.parametrize(
    ("capacity", "expected"), [(80, 1104), (120, 920), (160, 736), (200, 564), (260, 288)]
)
def test_training_reloads_what_was_measured_of_lru(capacity: int, expected: int) -> None:
    assert reloads(training(16, 4, 16, 4), capacity) == expected


def test_synthetic_traces_are_valid() -> None:
    made = itertools.chain(
        [chain(5, 100, steps=2), cyclic(4, 3, 100), training(3, 1, 2, 2, small=2, optimizer=True)],
        map(random_trace, range(50)),
    )
    for events in made:
        validator = Validator()
        for event in events:
            validator.check(event)
