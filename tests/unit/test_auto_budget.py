"""The hysteresis band with which the budget `auto` follows the free memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umem.base.native import core as native
from umem.base.units import GIB, MIB, PAGE_BYTES
from umem.errors import OutOfMemoryError
from umem.session import auto_budget
from umem.session.auto_budget import PATIENCE, AutoBudget, Band


def memory(
    free: int, budget: int, held: int, dropped: int = 0, total: int = 16 * GIB, unused: int = 0,
    allowed: int | None = None, requested: int = 0,
) -> Any:  # fmt: skip
    return {
        "device": 0, "free_bytes": free, "total_bytes": total, "budget_bytes": budget,
        "allowed_bytes": total if allowed is None else allowed,
        "held_bytes": held, "dropped_bytes": dropped, "unused_bytes": unused,
        "requested_bytes": requested,
    }  # fmt: skip


def test_the_first_budget_stays_while_no_other_process_allocates() -> None:
    band = Band(512 * MIB)
    budget = 16 * GIB - 512 * MIB
    for held in (0, 1 * GIB, 8 * GIB, budget):
        for dropped in (0, 1 * GIB):
            free = 16 * GIB - held - dropped
            assert band.budget(memory(free, budget, held, dropped)) is None


def test_what_umem_evicted_is_not_taken_for_another_process() -> None:
    """A GPU's driver keeps the memory of what left: a step of twice the budget ends like this."""
    band = Band(512 * MIB)
    budget = 16 * GIB - 512 * MIB
    for evicted in range(0, 513, 64):
        free, unused = 512 * MIB - evicted * MIB, evicted * MIB
        assert band.budget(memory(free, budget, budget, unused=unused)) is None
    taken = 4 * GIB
    row = memory(0, budget, 8 * GIB, unused=4 * GIB)
    assert band.budget(row) == 16 * GIB - taken - 512 * MIB


def test_it_stays_within_what_the_process_is_allowed() -> None:
    band = Band(512 * MIB)
    rows = [memory(15 * GIB, 4 * GIB, GIB, allowed=4 * GIB)] * (2 * PATIENCE)
    assert [band.budget(row) for row in rows] == [None] * len(rows)


def test_it_falls_at_once_and_by_what_others_took() -> None:
    band = Band(512 * MIB)
    budget = 16 * GIB - 512 * MIB
    assert band.budget(memory(512 * MIB - 200 * MIB, budget, budget)) is None
    assert band.budget(memory(MIB, budget, budget)) == budget - 512 * MIB
    fallen = band.budget(memory(4 * GIB, budget, 8 * GIB))
    assert fallen == 12 * GIB - 512 * MIB


def test_it_grows_only_when_there_is_room_for_some_time() -> None:
    band = Band(512 * MIB)
    more = memory(8 * GIB, 4 * GIB, 4 * GIB)
    assert [band.budget(more) for _ in range(PATIENCE)] == [
        *[None] * (PATIENCE - 1), 12 * GIB - 512 * MIB
    ]  # fmt: skip
    for _ in range(PATIENCE - 1):
        assert band.budget(more) is None
    assert band.budget(memory(512 * MIB, 4 * GIB, 4 * GIB)) is None  # it was absent for a moment
    assert [band.budget(more) for _ in range(PATIENCE - 1)] == [None] * (PATIENCE - 1)


sizes = st.integers(0, 4096).map(lambda pages: pages * PAGE_BYTES)


@given(total=sizes.filter(bool), others=st.lists(sizes, min_size=1, max_size=20), wanted=sizes)
def test_it_comes_to_rest_and_leaves_room_to_others(
    total: int, others: list[int], wanted: int
) -> None:
    """Also where the driver took memory from umem, which umem's books do not show."""
    headroom = max(native.headroom_bytes(total), 4 * PAGE_BYTES)
    band = Band(headroom)
    budget = max(0, total - headroom)
    history = []
    rest = 2 * total // headroom + 3 * PATIENCE
    for taken in [*others, *[others[-1]] * rest]:
        room = total - min(taken, total)
        books = min(wanted, budget)
        changed = band.budget(memory(room - min(books, room), budget, books, total=total))
        budget = budget if changed is None else changed
        history.append(budget)
    assert len(set(history[-PATIENCE:])) == 1
    assert min(wanted, budget) <= max(room, headroom // 2 + PAGE_BYTES)
    assert budget >= (room - 2 * headroom - 3 * PAGE_BYTES) * 8 // 9


class Core:
    """Plays the native core: one device."""

    def __init__(self, free: int, budget: int, held: int) -> None:
        self.row = memory(free, budget, held)
        self.refuses = False
        self.trims = 0

    def trim(self) -> None:
        """Others had taken the discarded memory, except for half of it."""
        self.trims += 1
        row = self.row
        self.row = {
            **row, "dropped_bytes": 0, "free_bytes": row["free_bytes"] + row["dropped_bytes"] // 2
        }  # fmt: skip

    def device_memory(self) -> list[dict[str, int]]:
        return [self.row]

    def set_device_budget(self, device: int, nbytes: int) -> None:
        if self.refuses:
            raise OutOfMemoryError("an op holds it")
        self.row = {**self.row, "budget_bytes": nbytes, "requested_bytes": nbytes}


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    made = Core(free=1 * GIB, budget=8 * GIB, held=2 * GIB)
    monkeypatch.setattr(auto_budget, "core", made)
    return made


def test_a_follower_sets_the_budget_and_not_below_the_least(core: Core) -> None:
    follower = AutoBudget(8 * MIB, lambda total: 512 * MIB)
    assert follower.look()
    assert core.row["budget_bytes"] == 3 * GIB - 512 * MIB
    assert not follower.look()
    core.row = {**core.row, "free_bytes": 0, "held_bytes": 0}
    assert follower.look()
    assert core.row["budget_bytes"] == 8 * MIB
    assert not follower.look()


def test_a_budget_that_the_program_set_stays(core: Core) -> None:
    follower = AutoBudget(8 * MIB, lambda total: 512 * MIB)
    assert follower.look()
    core.row = {**core.row, "budget_bytes": 6 * GIB}
    assert not follower.look()
    assert core.row["budget_bytes"] == 6 * GIB


def test_a_budget_that_the_program_set_before_the_first_look_stays(core: Core) -> None:
    core.row = {**core.row, "budget_bytes": 6 * GIB, "requested_bytes": 6 * GIB}
    follower = AutoBudget(8 * MIB, lambda total: 512 * MIB)
    assert not any(follower.look() for _ in range(2 * PATIENCE))


def test_what_is_refused_is_tried_again(core: Core) -> None:
    follower = AutoBudget(8 * MIB, lambda total: 512 * MIB)
    core.refuses = True
    assert not follower.look()
    core.refuses = False
    assert follower.look()


def test_discarded_memory_is_given_back_where_memory_is_short(core: Core) -> None:
    core.row = memory(0, 8 * GIB, 8 * GIB, dropped=1 * GIB)
    follower = AutoBudget(8 * MIB, lambda total: 2 * GIB)
    assert follower.look()  # else it would have seen more than there is
    assert core.trims == 1
    assert core.row["budget_bytes"] == 8 * GIB + GIB // 2 - 2 * GIB
    core.row = memory(0, core.row["budget_bytes"], core.row["budget_bytes"], dropped=3 * GIB)
    assert not follower.look()
    assert core.trims == 1  # not at every check: it waits for the device


def test_a_device_may_be_opened_while_memory_is_trimmed(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.row = memory(0, 8 * GIB, 8 * GIB, dropped=1 * GIB)
    other = {**memory(4 * GIB, 8 * GIB, 0), "device": 1}
    monkeypatch.setattr(core, "device_memory", lambda: [core.row, *([other] * core.trims)])
    assert AutoBudget(8 * MIB, lambda total: 2 * GIB).look()


def test_discarded_memory_lets_no_budget_grow() -> None:
    band = Band(512 * MIB)
    full = memory(0, 4 * GIB, 4 * GIB, dropped=8 * GIB)
    assert [band.budget(full) for _ in range(3 * PATIENCE)] == [None] * (3 * PATIENCE)


def test_it_looks_now_and_then(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(auto_budget.time, "monotonic", lambda: now)
    follower = AutoBudget(8 * MIB, lambda total: 512 * MIB)
    assert follower.step_ended()
    core.row = {**core.row, "free_bytes": 0}
    assert not follower.step_ended()
    now += 2 * auto_budget.EVERY_S
    assert follower.step_ended()
