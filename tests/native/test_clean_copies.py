"""Blocks that no op writes by the plan leave without a transfer, and no write is ever lost."""

from __future__ import annotations

from collections.abc import Iterator

import _core_testing
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planned import MIB, PAGE, Program, Tensor, columns, options, running

from umem import _core

READ_MOSTLY, PREFERRED = 1, 2  # attributes of a range
ROTATION = {"evict": [[0, 0], [1, 1], [2, 2]], "fetch": [[1, 3, 0], [2, 4, 1], [0, 2, 2]]}


@pytest.fixture
def program() -> Iterator[Program]:
    with running(options(12 * MIB)) as made:
        yield made


def weights(program: Program, names: str) -> list[Tensor]:
    return [Tensor(address=program.take(name)) for name in names]


def advised(program: Program, name: str) -> bool:
    values = [
        _core_testing.cuMemRangeGetAttribute(attribute, program.at[name], 4 * MIB, 1)
        for attribute in (READ_MOSTLY, PREFERRED)
    ]
    assert values[1] == (0, [-2])  # only for a moment
    return bool(values[0][1][0])


def pages(program: Program, name: str) -> list[str]:
    return list(_core_testing.page_states(program.at[name], 4 * MIB))


def moved_out() -> int:
    return int(_core.stats()["bytes_out"])


def step(program: Program, ops: str) -> None:
    for name in ops:
        program.op(name)
    _core.step()


def use(program: Program, name: str, written: bool = False) -> None:
    """An op that reads all of the block's value, and may change it."""
    token = _core.op_begin([program.at[name]], "", "forward")
    program.check(name)
    if written:
        program.fill(name)
    _core.op_end(token, "")


def test_what_no_op_writes_leaves_without_a_transfer(program: Program) -> None:
    plan = columns(weights(program, "abc"), [[0], [1], [2]], **ROTATION, read_mostly=[0, 1, 2])
    _core.install_plan(plan)
    assert all(advised(program, name) for name in "abc")
    step(program, "abc")
    assert moved_out() == 12 * MIB  # the host had no copy
    before = _core.stats()
    for _ in range(3):
        for name in "abc":
            use(program, name)
            assert pages(program, name) == ["host"] * 2  # it has left its frames
        _core.step()
    after = _core.stats()
    assert after["bytes_out"] == before["bytes_out"]
    assert after["evictions"] == before["evictions"] + 9
    assert after["bytes_in"] == before["bytes_in"] + 9 * 4 * MIB
    assert after["faults"] == before["faults"]
    assert after["peak_resident_bytes"] <= 12 * MIB


def test_a_write_to_a_clean_unit_is_kept_and_moves_what_was_written(program: Program) -> None:
    tensors = weights(program, "ab")
    ops = [[0], [1], [1], [0]]
    _core.install_plan(columns(tensors, ops, evict=[[0, 0]], fetch=[[1, 3, 0]], read_mostly=[0]))
    step(program, "abba")
    assert pages(program, "a") == ["duplicate"] * 2
    _core_testing.store(program.at["a"] + PAGE, b"written")
    assert pages(program, "a") == ["duplicate", "device"]
    before = moved_out()
    program.op("a")
    assert pages(program, "a") == ["host"] * 2
    assert moved_out() == before + PAGE
    assert _core_testing.load(program.at["a"] + PAGE, 7) == b"written"
    program.check("a")
    program.op("b")


def write(program: Program, name: str) -> None:
    """An op that says that it writes the block."""
    token = _core.op_begin([program.at[name]], "", "forward", "", 0, 1)
    program.fill(name)
    _core.op_end(token, "")


def test_what_was_clean_stays_so_when_the_plans_go(program: Program) -> None:
    tensors = weights(program, "ab")
    ops = [[0], [1], [1], [0]]
    _core.install_plan(columns(tensors, ops, evict=[[0, 0]], fetch=[[1, 3, 0]], read_mostly=[0, 1]))
    step(program, "abba")
    assert pages(program, "a") == ["duplicate"] * 2
    _core.clear_plans()
    assert advised(program, "a")
    assert advised(program, "b")
    assert pages(program, "a") == ["duplicate"] * 2
    faults = _core.stats()["faults"]
    write(program, "a")
    assert (advised(program, "a"), advised(program, "b")) == (False, True)
    assert pages(program, "a") == ["device"] * 2
    assert _core.stats()["faults"] == faults  # no copy that a write must drop


def test_the_advice_lasts_until_an_op_writes(program: Program) -> None:
    """Models in turn have a plan each, and leave the weights of the others as they are."""
    tensors = weights(program, "ab")
    both = lambda: (advised(program, "a"), advised(program, "b"))  # noqa: E731
    _core.install_plan(columns(tensors, [[0], [0]], read_mostly=[0]))
    _core.install_plan(columns(tensors, [[0], [1]], read_mostly=[1]))
    assert both() == (True, True)
    step(program, "aa")
    step(program, "bb")  # no plan fits
    assert both() == (True, True)
    write(program, "b")
    write(program, "a")
    assert both() == (False, False)
    _core.step()
    step(program, "ab")
    assert both() == (False, True)
    step(program, "aa")
    assert both() == (True, True)


def test_the_programs_own_hint_outlives_a_write(program: Program) -> None:
    tensors = weights(program, "ab")
    _core.read_mostly(program.at["a"], 4 * MIB, True)
    _core.install_plan(columns(tensors, [[0], [1]], read_mostly=[0, 1]))
    for name in "ab":
        write(program, name)
    assert (advised(program, "a"), advised(program, "b")) == (True, False)


def test_a_new_owner_of_the_range_is_not_read_mostly(program: Program) -> None:
    tensors = weights(program, "ab")
    _core.install_plan(columns(tensors, [[0], [1]], read_mostly=[0, 1]))
    ptr = program.at["a"]
    program.drop("a")
    assert program.take("new") == ptr
    assert not advised(program, "new")
    step(program, "b")


# "a" is written in op 0 and read in op 1; it leaves after that and returns for op 0.
COPIED = {"evict": [[1, 0]], "fetch": [[2, 4, 0]]}


def test_a_copy_made_early_spares_the_way_out(program: Program) -> None:
    tensors = weights(program, "ab")
    ops = [[0], [0], [1], [1]]
    _core.install_plan(columns(tensors, ops, **COPIED, copy=[[0, 4, 0]]))
    for _ in range(3):
        before = _core.stats()
        use(program, "a", written=True)
        assert pages(program, "a") == ["duplicate"] * 2
        assert advised(program, "a")
        assert moved_out() == before["bytes_out"] + 4 * MIB
        use(program, "a")
        assert pages(program, "a") == ["host"] * 2
        assert moved_out() == before["bytes_out"] + 4 * MIB  # not again
        assert _core.stats()["evictions"] == before["evictions"] + 1
        use(program, "b")
        use(program, "b")  # and it was fetched again, for a write
        _core.step()
        assert pages(program, "a") == ["device"] * 2
        assert not advised(program, "a")
        assert _core.stats()["faults"] == before["faults"]


def test_what_leaves_twice_between_two_writes_is_transferred_once(program: Program) -> None:
    tensors = weights(program, "ab")
    ops = [[0], [1], [1], [0], [1], [1]]
    leaves = {"evict": [[0, 0], [3, 0]], "fetch": [[1, 3, 0], [4, 6, 0]]}
    for copy, transfers in (([], 2), ([[0, 6, 0]], 1)):
        _core.clear_plans()
        _core.install_plan(columns(tensors, ops, **leaves, copy=copy))
        for _ in range(2):
            before = moved_out()
            use(program, "a", written=True)
            for name in "bbabb":
                use(program, name)
            _core.step()
            assert moved_out() == before + transfers * 4 * MIB


@pytest.mark.parametrize("ends", ["diverged", "cleared", "freed"])
def test_a_copy_ends_with_its_plan(program: Program, ends: str) -> None:
    tensors = weights(program, "ab")
    # The ops have other names than the program's: it is not found again.
    _core.install_plan(columns(tensors, [[0], [0], [1], [1]], op=[0] * 4, copy=[[0, 8, 0]]))
    use(program, "a", written=True)
    assert advised(program, "a")
    if ends == "diverged":
        use(program, "b")
    elif ends == "cleared":
        _core.clear_plans()
    else:
        program.drop("a")
        program.take("a")
    assert not advised(program, "a")
    faults = _core.stats()["faults"]
    program.fill("a")
    assert _core.stats()["faults"] == faults


def test_a_copy_counts_towards_the_host_budget() -> None:
    _core.start(options(12 * MIB, host_budget_bytes=4 * MIB))
    program = Program()
    try:
        tensors = weights(program, "ab")
        ops = [[0], [1], [1], [1]]
        _core.install_plan(columns(tensors, ops, copy=[[0, 8, 0], [1, 8, 1]]))
        program.op("a")
        assert _core.stats()["host_bytes"] == 4 * MIB
        program.op("b")
        assert _core.stats()["host_bytes"] == 4 * MIB  # a second one does not fit
        assert (advised(program, "a"), advised(program, "b")) == (True, False)
    finally:
        program.clear()


NAMES = "abcd"


@settings(max_examples=60)
@given(
    read_mostly=st.lists(st.integers(0, 3), unique=True),
    evict=st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 3)), max_size=8),
    copy=st.lists(
        st.tuples(st.integers(-1, 3), st.integers(0, 8), st.integers(0, 3)).filter(
            lambda row: row[1] > row[0]
        ),
        max_size=6,
    ),
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=4, max_size=4), max_size=5
    ),
    right=st.booleans(),
)
def test_whatever_is_written_no_byte_is_lost(
    read_mostly: list[int],
    evict: list[tuple[int, int]],
    copy: list[tuple[int, int, int]],
    steps: list[list[tuple[int, bool]]],
    right: bool,
) -> None:
    """The plan may be wrong in what it calls clean, and in the ops too unless `right`."""
    _core.start(options(8 * MIB))
    program = Program()
    try:
        tensors = weights(program, NAMES)
        moves = {"evict": evict, "copy": copy, "read_mostly": read_mostly}
        _core.install_plan(columns(tensors, [[0], [1], [2], [3]], **moves))
        for ops in steps:
            for at, (which, written) in enumerate(ops):
                name = NAMES[at if right else which]
                use(program, name, written)
                rows = _core_testing.blocks()
                held = [b["bytes"] for b in rows if b["state"] in ("device", "dead")]
                assert sum(held) <= 8 * MIB
                for block in program.at:  # the ledger knows the blocks without frames
                    if program.state(block) == "host":
                        assert set(pages(program, block)) == {"host"}
            _core.step()
    finally:
        program.clear()
