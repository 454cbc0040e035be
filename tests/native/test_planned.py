"""The native policy `planned`: it follows plans by op, and acts."""

from __future__ import annotations

import threading
from collections.abc import Callable

import _core_testing
import pytest
from support.planned import MIB, ORDERS, Program, Tensor, columns, weights

from umem import _core
from umem.errors import ConfigError, StateError


def counted() -> tuple[int, int]:
    stats = _core.stats()
    return stats["plan_hits"], stats["plan_misses"]


def test_a_program_that_follows_its_plan_hits_at_every_op(program: Program) -> None:
    tensors = weights(program, "ab")
    number = _core.install_plan(columns(tensors, [[0], [1], [0, 1]]))
    for _ in range(3):
        program.op("a")
        program.op("b")
        program.op("b", "a", "a")
        _core.step()
    assert counted() == (9, 0)
    status = _core.plan_status()
    assert status == {
        "plans": [number],
        "active": number,
        "complete": number,
        "hits": 3,
        "misses": 0,
    }


def test_ops_on_small_tensors_only_do_not_count(program: Program) -> None:
    tensors = weights(program, "a")
    small = _core.allocate(1000)
    _core.install_plan(columns(tensors, [[0], [0]]))
    for _ in range(2):
        program.op("a")
        _core.op_end(_core.op_begin([small], "", ""), "")
        _core.op_end(_core.op_begin([], "", ""), "")
        _core.op_end(_core.op_begin([small, program.at["a"]], "", ""), "")
        _core.step()
    assert counted() == (4, 0)
    _core.release(small)


def test_evicts_and_fetches_at_its_ops(program: Program) -> None:
    tensors = weights(program, "abc")
    _core.install_plan(
        columns(tensors, [[0], [1], [2], [0]], evict=[[0, 0], [3, 1]], fetch=[[1, 3, 0]])
    )
    away = []
    for op in ("a", "b", "c", "a"):
        program.op(op)
        away.append(program.away())
    assert away == [{"a"}, set(), set(), {"b"}]
    assert _core.stats()["faults"] == 0
    assert _core.stats()["prefetches"] == 1
    _core.step()
    program.op("a")
    assert program.away() == {"a", "b"}


def test_moves_of_the_steps_begin(program: Program) -> None:
    tensors = weights(program, "ab")
    plan = columns(tensors, [[0], [1]], evict=[[-1, 1], [1, 0]], fetch=[[-1, 0, 0]])
    _core.install_plan(plan)
    assert program.away() == {"b"}  # a step begins with its installation
    program.op("a")
    program.op("b")
    assert program.away() == {"a"}
    _core.step()
    assert program.away() == {"b"}


def test_what_is_in_use_stays_until_its_use_is_over(program: Program) -> None:
    tensors = weights(program, "ab")
    # The outer op, which ends last, is an op on `a` for the plan too.
    plan = columns(tensors, [[0], [1], [0]], evict=[[0, 0], [1, 0], [2, 0]], fetch=[[1, 2, 0]])
    _core.install_plan(plan)
    outer = _core.op_begin([program.at["a"]], "", "")
    program.op("a")
    program.op("b")
    assert program.away() == set()
    _core.op_end(outer, "")
    assert program.away() == {"a"}
    assert counted() == (3, 0)


@pytest.mark.parametrize("gated", [0, 1])
def test_a_fetch_evicts_nothing_and_waits_for_room(program: Program, gated: int) -> None:
    tensors = weights(program, "abcde")
    assert program.away() == {"a"}
    plan = columns(
        tensors,
        [[1], [2], [3], [0]],
        fetch=[[-1, 3, 0]],
        evict=[[1, 1]],
        gated=gated,
        capacity=1 << 40,
    )
    _core.install_plan(plan)
    assert program.away() == {"a"}
    program.op("b")
    assert program.away() == {"a"}
    program.op("c")  # after which `b` leaves
    assert program.away() == {"b"}


def test_fetches_in_their_order(program: Program) -> None:
    tensors = weights(program, "abcdef")
    assert program.away() == {"a", "b"}
    plan = columns(
        tensors, [[2], [3], [4], [0], [1]], fetch=[[-1, 4, 1], [-1, 3, 0]], evict=[[0, 2], [1, 3]]
    )
    _core.install_plan(plan)
    program.op("c")
    assert program.away() == {"a", "c"}  # first come, first served
    program.op("d")
    assert program.away() == {"c", "d"}


def test_gated_fetches_go_by_their_deadline(program: Program) -> None:
    tensors = weights(program, "abcdef")
    plan = columns(
        tensors,
        [[2], [3], [4], [0], [1]],
        fetch=[[-1, 4, 1], [-1, 3, 0]],
        evict=[[0, 2], [1, 3]],
        gated=1,
        capacity=1 << 40,
    )
    _core.install_plan(plan)
    program.op("c")
    assert program.away() == {"b", "c"}
    program.op("d")
    assert program.away() == {"c", "d"}


def test_the_gate_leaves_room_for_what_the_plan_has_until_then(program: Program) -> None:
    tensors = weights(program, "abc")
    plan = columns(
        tensors,
        [[0], [1], [2], [1], [0]],
        evict=[[0, 0]],
        fetch=[[0, 4, 0]],
        gated=1,
        capacity=12 * MIB,
        occupancy=[12 * MIB, 8 * MIB, 12 * MIB, 8 * MIB, 12 * MIB],
    )
    _core.install_plan(plan)
    seen = []
    for op in "abcba":
        program.op(op)
        seen.append(program.away() == {"a"})
    # Op 2 takes all of the capacity, so the bytes may arrive when it is over.
    assert seen == [True, True, False, False, False]


def test_headroom_is_not_filled_again_by_what_left_for_it(program: Program) -> None:
    ops = [[0], [1], [2], [3]]
    tensors = weights(program, "abcd")
    _core.install_plan(
        columns(tensors, ops, gated=1, capacity=16 * MIB, occupancy=[16 * MIB] * 4,
                headroom=4 * MIB)
    )  # fmt: skip
    before = _core.stats()["prefetches"]
    for _ in range(5):
        for op in "abcd":
            program.op(op)
        _core.step()
    assert _core.stats()["prefetches"] - before <= 5 * 4  # one for each use at most


def test_a_started_fetch_takes_its_room_from_later_ones(program: Program) -> None:
    tensors = weights(program, "abcd")
    plan = columns(
        tensors,
        [[0], [1], [2], [3], [2], [0], [1]],
        evict=[[0, 0], [1, 1]],
        fetch=[[1, 5, 0], [1, 6, 1]],
        gated=1,
        capacity=12 * MIB,
        occupancy=[n * MIB for n in (12, 12, 8, 8, 8, 12, 4)],
    )
    _core.install_plan(plan)
    away = []
    for op in "abcdcab":
        program.op(op)
        away.append("".join(sorted(program.away())))
    assert away == ["a", "b", "b", "b", "b", "", ""]


def test_what_pressure_drives_out_comes_back_before_its_next_use(program: Program) -> None:
    """A demand fetch would queue behind all of the plan's requests so far."""
    tensors = weights(program, "abcd")
    ops = [[0], [1], [2], [3], [0]]
    full = [16 * MIB] * len(ops)
    plan = columns(
        tensors, ops, gated=1, capacity=16 * MIB, occupancy=full, order=ORDERS["furthest"]
    )
    _core.install_plan(plan)
    program.op("a")
    small = _core.allocate(MIB)  # a page that no plan knows of
    assert program.away() == {"a"}
    assert _core.release(small)
    program.op("b")
    assert program.away() == set()


def test_pressure_drives_out_first_what_the_plan_has_away(program: Program) -> None:
    """The first step of a plan begins with bytes on the device that the plan fetches later."""
    tensors = weights(program, "abcd")
    ops = [[1], [2], [3], [0], [1]]
    full = [n * MIB for n in (12, 12, 12, 16, 16)]
    plan = columns(
        tensors,
        ops,
        evict=[[3, 0]],
        fetch=[[2, 3, 0]],
        gated=1,
        capacity=16 * MIB,
        occupancy=full,
        order=ORDERS["furthest"],
    )
    _core.install_plan(plan)
    program.op("b")  # its next use is further away than that of `a`
    small = _core.allocate(MIB)
    assert program.away() == {"a"}
    assert _core.release(small)
    program.op("c")
    assert program.away() == {"a"}  # though it fits: the plan fetches it
    program.op("d")
    assert program.away() == set()
    small = _core.allocate(MIB)
    assert program.away() == {"d"}  # `a` is back for its use, and stays
    assert _core.release(small)


def test_a_fetch_for_the_next_step_carries_over(program: Program) -> None:
    tensors = weights(program, "abcde")
    assert program.away() == {"a"}
    plan = columns(
        tensors,
        [[1], [2], [3], [4]],
        fetch=[[2, 4 + 1, 0]],
        evict=[[0, 1]],
        gated=1,
        capacity=16 * MIB,
        occupancy=[n * MIB for n in (16, 12, 16, 16)],
    )
    _core.install_plan(plan)
    for op in "bcde":
        program.op(op)
    assert program.away() == {"a", "b"}
    _core.step()
    assert program.away() == {"a", "b"}  # the first op still has all of the capacity
    program.op("b")
    assert program.away() == {"b"}


def test_carried_tensors_keep_their_place(program: Program) -> None:
    tensors = [
        Tensor(address=program.take("w")),
        Tensor(kind="carried", next_alias=2),
        Tensor(kind="made"),
    ]
    plan = columns(tensors, [[0, 1], [0, 2], [0]], evict=[[1, 2]], fetch=[])
    program.take("old")
    tensors[1] = tensors[1]._replace(address=program.at["old"])
    plan = columns(tensors, [[0, 1], [0, 2], [0]], evict=[[1, 2], [2, 0]])
    _core.install_plan(plan)
    for _ in range(3):
        program.op("w", "old")
        program.drop("old")
        program.take("new")
        program.op("w", "new")
        assert program.away() == {"new"}
        program.op("w")
        program.rename("new", "old")
        _core.step()
    assert counted() == (9, 0)


def test_a_carried_tensor_that_was_not_there_is_found_by_its_first_use(program: Program) -> None:
    tensors = [
        Tensor(address=program.take("w")),
        Tensor(kind="carried", next_alias=2),
        Tensor(kind="made"),
    ]
    _core.install_plan(columns(tensors, [[0, 1], [0, 2]]))
    program.take("stranger", 6)
    program.take("old")
    _core.step()
    program.op("w", "old")
    program.drop("old")
    program.take("new")
    program.op("w", "new")
    assert counted()[0] == 2


def other_size(program: Program) -> None:
    program.take("x", 6)


def other_op(program: Program) -> None:
    program.op("c")


def more_tensors(program: Program) -> None:
    program.op("a", "b")


def one_more_op(program: Program) -> None:
    program.op("a")
    program.op("b")
    program.op("c")
    program.op("a")


@pytest.mark.parametrize("leave", [other_size, other_op, more_tensors, one_more_op])
def test_a_program_that_leaves_its_plan(program: Program, leave: Callable[[Program], None]) -> None:
    _core.set_budget(32 * MIB, 0)
    tensors = weights(program, "abc")
    # Its names differ from the program's: no op matches one of the plan.
    plan = columns(tensors, [[0], [1], [2]], op=[0] * 3, evict=[[0, 0], [2, 0]])
    number = _core.install_plan(plan)
    leave(program)
    before = counted()[1]
    assert _core.plan_status()["active"] == 0
    program.op("a")
    program.op("b")
    assert counted()[1] == before + 2
    program.op("a")
    assert program.state("a") == "device"  # the plan is no longer executed
    _core.step()
    assert _core.plan_status()["complete"] == 0
    program.op("a")
    assert program.away() == {"a"}  # and a step later it continues
    assert _core.plan_status()["active"] == number


def test_a_shorter_step_is_not_complete_and_the_next_one_is(program: Program) -> None:
    tensors = weights(program, "ab")
    number = _core.install_plan(columns(tensors, [[0], [1]]))
    program.op("a")
    _core.step()
    assert _core.plan_status()["complete"] == 0
    program.op("a")
    program.op("b")
    _core.step()
    assert _core.plan_status()["complete"] == number
    assert counted() == (3, 0)


def test_two_plans_take_turns(program: Program) -> None:
    tensors = weights(program, "abc")
    one = _core.install_plan(columns(tensors, [[0], [1], [2]], evict=[[1, 0]]))
    two = _core.install_plan(columns(tensors, [[0], [2], [1]], evict=[[1, 1]]))
    for ops, number, gone in (("abc", one, "a"), ("acb", two, "")) * 2:
        for op in ops:
            program.op(op)
        _core.step()
        assert _core.plan_status()["complete"] == number
        assert _core.plan_status()["misses"] == 0
        assert program.away() == set(gone)
        program.op("a")
        _core.step()
    assert len(_core.plan_status()["plans"]) == 2


def test_of_two_plans_that_fit_the_one_that_was_right_last_acts(program: Program) -> None:
    tensors = weights(program, "abc")
    _core.install_plan(columns(tensors, [[0], [1], [2]], evict=[[1, 0]]))
    two = _core.install_plan(columns(tensors, [[0], [1], [2]], evict=[[2, 1]]))
    for _ in range(3):
        for op in "abc":
            program.op(op)
        assert program.away() == {"b"}
        _core.step()
        assert _core.plan_status()["complete"] == two


def test_of_too_many_plans_the_one_that_was_right_longest_ago_goes(program: Program) -> None:
    tensors = weights(program, "ab")
    plans = [columns(tensors, [[0]] * n) for n in range(1, 9)]
    first = _core.install_plan(plans[0])
    program.op("a")
    _core.step()
    for plan in plans[1:]:
        _core.install_plan(plan)
    assert len(_core.plan_status()["plans"]) == 8
    _core.install_plan(columns(tensors, [[1]]))
    assert len(_core.plan_status()["plans"]) == 8
    program.op("a")
    _core.step()
    assert _core.plan_status()["complete"] == 0  # `first` was the oldest
    program.op("a")
    program.op("a")
    _core.step()
    assert _core.plan_status()["complete"] == first + 1
    _core.clear_plans()
    assert _core.plan_status()["plans"] == []
    before = counted()
    program.op("a")
    assert counted() == before


def pressure(program: Program, **changes: object) -> set[str]:
    """The block evicted for one more, after ops on a, b, c, d in this order and before others."""
    tensors = weights(program, "abcd")
    ops = [[0], [1], [2], [3], [0], [2], [1], [3]]
    _core.install_plan(columns([*tensors, Tensor(kind="transient")], ops, **changes))
    for op in "abcd":
        program.op(op)
    program.take("new")
    return program.away()


@pytest.mark.parametrize(
    ("changes", "victims"),
    [
        ({}, "a"),
        ({"cold": [[2, 2]]}, "c"),
        ({"cold": [[1, 2]]}, "a"),  # its next use ended that
        ({"keep": [0]}, "b"),
        ({"keep": [0, 1, 2, 3]}, "a"),
        ({"window": 1}, "b"),
        ({"window": 2}, "b"),
        ({"window": 3}, "d"),
        ({"window": 4}, "a"),
        ({"order": 2}, "d"),
        ({"order": 2, "keep": [3]}, "b"),
        ({"order": 1}, "a"),
        ({"headroom": 8 * MIB}, "ab"),
        ({"headroom": 100 * MIB}, "abcd"),
    ],
)
def test_which_tensors_leave_under_pressure(
    program: Program, changes: dict[str, object], victims: str
) -> None:
    assert pressure(program, **changes) == set(victims)


@pytest.mark.parametrize(("between", "victim"), [("", "c"), ("a", "scratch")])
def test_what_only_the_last_op_used_stays_until_the_next_one(
    program: Program, between: str, victim: str
) -> None:
    """That op may be within another, which reads its result: mixed types are converted so."""
    tensors = [*weights(program, "abc"), Tensor(kind="transient"), Tensor(kind="transient")]
    ops = [[0], [1], [2], [3], [0], [1], [2], [4]]
    _core.install_plan(columns(tensors, ops, order=2))
    for op in "abc":
        program.op(op)
    program.take("scratch")
    program.op("scratch")
    for op in between:
        program.op(op)
    program.take("new")
    assert program.away() == {victim}


@pytest.mark.parametrize("others", [4, 8])
def test_what_an_inner_op_leaves_stays_for_the_outer_one(program: Program, others: int) -> None:
    """The outer op uses it unseen, as the backward of an embedding does; not after eight others."""
    tensors = [*weights(program, "a"), Tensor(kind="made")]
    ops = [[0, 1], *[[0]] * others, [0]]
    _core.install_plan(columns(tensors, ops, evict=[[0, 1]]))
    outer = _core.op_begin([program.at["a"]], "", "")
    inner = _core.op_begin([program.at["a"]], "", "")
    program.take("made")
    _core.op_end(inner, "")
    _core.op_end(_core.op_begin([], "", ""), "")  # such as the op that it was a part of
    for _ in range(others):
        assert program.away() == set()
        program.op("a")
    assert program.away() == ({"made"} if others == 8 else set())
    _core.op_end(outer, "")
    assert program.away() == {"made"}
    assert counted() == (others + 2, 0)


def test_what_an_inner_op_leaves_is_copied_once_the_outer_one_ends(program: Program) -> None:
    """A write during the copy is a page fault."""
    tensors = [*weights(program, "a"), Tensor(kind="made")]
    plan = columns(tensors, [[0, 1], [0], [0], [1]], copy=[[0, 3, 1]], evict=[[2, 1]])
    _core.install_plan(plan)
    outer = _core.op_begin([program.at["a"]], "", "")
    inner = _core.op_begin([program.at["a"]], "", "")
    program.take("made")
    _core.op_end(inner, "")
    program.fill("made")
    assert _core.stats()["faults"] == 0
    _core.op_end(outer, "")
    program.op("a")
    assert program.away() == {"made"}
    assert _core.stats()["faults"] == 0


def test_fifo_goes_by_the_first_use_since_it_came(program: Program) -> None:
    tensors = weights(program, "abcd")
    _core.install_plan(
        columns([*tensors, Tensor(kind="transient")], [[1], [0], [2], [3], [1]], order=1)
    )
    for op in "bacdb":
        program.op(op)
    program.take("new")
    assert program.away() == {"b"}  # though `a` was used longer ago


def test_unknown_blocks_and_small_ones_go_after_the_known(program: Program) -> None:
    program.take("stranger")
    tensors = weights(program, "abc")
    _core.install_plan(columns([*tensors, Tensor(kind="transient")], [[0], [1], [2], [0]], order=2))
    for op in "abc":
        program.op(op)
    program.take("new")
    assert program.away() == {"c"}


@pytest.mark.parametrize(
    ("steps", "asked_for", "victim"),
    [(1, False, "c"), (2, False, "stranger"), (2, True, "c")],
)
def test_unknown_blocks_that_the_last_step_did_not_use_go_first(
    program: Program, steps: int, asked_for: bool, victim: str
) -> None:
    """Such as an old optimizer's states that wait for Python's collector."""
    program.take("stranger")
    tensors = weights(program, "abc")
    _core.install_plan(columns(tensors, [[0], [1], [2], [0]], order=2))
    program.op("stranger")
    for _ in range(steps):
        for op in "abca":
            program.op(op)
        _core.step()
    if asked_for:
        _core.evict(program.at["stranger"], 4 * MIB)
        _core.prefetch(program.at["stranger"], 4 * MIB)
    program.take("new")
    assert program.away() == {victim}


def test_compute_waits_where_the_plan_says(program: Program) -> None:
    tensors = weights(program, "ab")

    def stall(waits: list[int]) -> int:
        _core.clear_plans()
        _core.install_plan(columns(tensors, [[0], [1], [1]], evict=[[0, 0]], waits=waits))
        before = _core.stats()["stall_us"]
        for op in "abb":
            program.op(op)
            _core_testing.launch(0, 1.0)
        _core_testing.cuStreamSynchronize(0)
        _core.step()
        return int(_core.stats()["stall_us"] - before)

    assert stall([]) == 0
    assert stall([0]) > 100


def test_a_persistent_tensor_that_is_freed_and_one_that_takes_its_place(program: Program) -> None:
    tensors = weights(program, "ab")
    _core.install_plan(columns(tensors, [[0], [1]], evict=[[0, 1], [1, 0]], fetch=[[0, 2, 0]]))
    program.op("a")
    program.drop("b")
    _core.step()
    program.take("c")  # an allocation that the plan does not have
    assert _core.plan_status()["active"] == 0
    _core.step()
    program.op("a")
    program.op("c")  # of the same size, in place of the plan's `b`, which was freed
    assert counted()[0] == 3
    _core.step()
    assert _core.plan_status()["complete"] == 1


def test_the_budget_changes_under_a_plan(program: Program) -> None:
    tensors = weights(program, "abcd")
    _core.install_plan(columns(tensors, [[0], [1], [2], [3]], fetch=[[-1, 3, 3]]))
    for budget in (8, 32, 12, 16):
        _core.set_budget(budget * MIB, 0)
        for op in "abcd":
            program.op(op)
        _core.step()
        assert _core.plan_status()["hits"] == 4
        assert _core.stats()["resident_bytes"] <= budget * MIB


def test_only_planned_follows_plans(program: Program) -> None:
    tensors = weights(program, "a")
    plan = columns(tensors, [[0]])
    _core.install_plan(plan)
    _core_testing.set_policy("lru")
    for call in (lambda: _core.install_plan(plan), _core.clear_plans, _core.plan_status):
        with pytest.raises(StateError, match=r"'lru'.*'planned'"):
            call()
    _core_testing.set_policy("planned")
    assert _core.plan_status()["plans"] == []


def test_no_plans_where_no_device_is_open() -> None:
    assert _core.plan_status()["plans"] == []  # as on a GPU before its first allocation
    _core.clear_plans()
    with pytest.raises(StateError, match="the plan's device is not open"):
        _core.install_plan(columns([Tensor()], [[0]]))


def moved() -> int:
    stats = _core.stats()
    return stats["bytes_in"] + stats["bytes_out"]


def test_a_rolled_back_plan_is_followed_and_moves_nothing(program: Program) -> None:
    tensors = weights(program, "abc")  # all of them fit
    shuttle = columns(
        tensors, [[0], [1], [2], [0]], evict=[[0, 0]], fetch=[[1, 3, 0]], read_mostly=[0]
    )
    number = _core.install_plan(shuttle)

    def step() -> int:
        before = moved()
        for op in "abca":
            program.op(op)
        _core.step()
        return moved() - before

    assert step() > 0
    _core.roll_back_plan(number)
    assert [step() for _ in range(3)] == [0, 0, 0]
    status = _core.plan_status()
    assert status == {
        "plans": [number],
        "active": number,
        "complete": number,
        "hits": 4,
        "misses": 0,
    }
    assert _core.stats()["plans_rolled_back"] == 1


def test_only_the_plan_named_is_rolled_back(program: Program) -> None:
    tensors = weights(program, "ab")
    first = _core.install_plan(columns(tensors, [[0], [1]], evict=[[1, 0]]))
    second = _core.install_plan(columns(tensors, [[1], [0]], evict=[[1, 1]]))
    _core.roll_back_plan(second)
    away = []
    for ops in ("ab", "ba", "ab"):
        for op in ops:
            program.op(op)
        away.append((program.away(), _core.plan_status()["active"]))
        _core.step()
    assert away == [({"a"}, first), (set(), second), ({"a"}, first)]


def test_a_rolled_back_plan_still_knows_what_is_carried(program: Program) -> None:
    tensors = [
        Tensor(address=program.take("w")),
        Tensor(kind="carried", next_alias=2, address=program.take("old")),
        Tensor(kind="made"),
    ]
    number = _core.install_plan(columns(tensors, [[0, 1], [0, 2], [0]], evict=[[1, 2]]))
    complete = []
    for i in range(4):
        program.op("w", "old")
        program.drop("old")
        program.take("new")
        program.op("w", "new")
        program.op("w")
        program.rename("new", "old")
        _core.step()
        complete.append(_core.plan_status()["complete"])
        if i == 1:
            _core.roll_back_plan(number)
    assert complete == [number] * 4
    assert program.away() == set()


def test_a_plan_that_is_not_there_cannot_be_rolled_back(program: Program) -> None:
    number = _core.install_plan(columns(weights(program, "a"), [[0]]))
    with pytest.raises(ConfigError, match=f"no plan {number + 1}.*keeps the 8"):
        _core.roll_back_plan(number + 1)
    assert _core.stats()["plans_rolled_back"] == 0
    _core_testing.set_policy("lru")
    with pytest.raises(StateError, match="followed by 'planned' only"):
        _core.roll_back_plan(number)


def test_a_plan_can_be_replaced_for_the_same_steps(program: Program) -> None:
    tensors = weights(program, "ab")
    number = _core.install_plan(columns(tensors, [[0], [1]], evict=[[1, 0]]))
    away = []
    for i in range(3):
        for op in "ab":
            program.op(op)
        away.append(program.away())
        _core.step()
        if i == 0:  # the location of its tensors is known
            _core.replace_plan(number, columns([Tensor(), Tensor()], [[0], [1]], evict=[[1, 1]]))
    assert away == [{"a"}, {"b"}, {"b"}]
    assert _core.plan_status()["complete"] == number
    assert _core.stats()["plans_rolled_back"] == 0
    with pytest.raises(ConfigError, match="for other steps"):
        _core.replace_plan(number, columns([Tensor(), Tensor()], [[1], [0]]))
    with pytest.raises(ConfigError, match=f"no plan {number + 1}"):
        _core.replace_plan(number + 1, columns([Tensor(), Tensor()], [[0], [1]]))
    assert len(_core.plan_status()["plans"]) == 1


def test_without_plans_the_last_step_went_by_none(program: Program) -> None:
    _core.install_plan(columns(weights(program, "a"), [[0]]))
    program.op("a")
    _core.step()
    _core.clear_plans()
    none = {"plans": [], "active": 0, "complete": 0, "hits": 0, "misses": 0}
    assert _core.plan_status() == none
    program.op("a")
    _core.step()
    assert _core.plan_status() == none


def test_a_helper_has_the_memory_that_an_op_had_for_itself(program: Program) -> None:
    tensors = [*weights(program, "a"), Tensor(kind="transient")]
    _core.install_plan(columns(tensors, [[0], [0, 1], [0]]))
    taken: list[int] = []
    for _ in range(3):
        program.op("a")
        op = _core.op_begin([program.at["a"]], "", "")
        scratch = _core.allocate(4 * MIB)
        _core.release(scratch)
        helper = threading.Thread(target=lambda: taken.append(_core.allocate(4 * MIB)))
        helper.start()
        helper.join()
        _core.op_end(op, "")
        assert taken[-1] == scratch
        program.op("a")
        _core.release(taken[-1])
        _core.step()
    assert counted() == (9, 0)
