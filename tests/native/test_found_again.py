"""Steps that leave their plan for some ops: the cursor finds the program's place again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.planned import MIB, PAGE, Program, Tensor, columns, options, running, weights

from umem import _core

BLOCKS = "abcd"


@pytest.fixture
def program() -> Iterator[Program]:
    with running(options(budget=256 * MIB)) as made:
        yield made


def counted() -> tuple[int, int]:
    stats = _core.stats()
    return int(stats["plan_hits"]), int(stats["plan_misses"])


def residual(program: Program, blocks: str, mib: int = 4) -> None:
    """A step of blocks `x = f(x, w)`, then their gradients in the other order."""
    last = ""
    for name in blocks:
        program.take(f"x{name}", mib)
        program.op(*filter(None, (last, name, f"x{name}")))
        last = f"x{name}"
    program.take("g")
    program.op(last, "g")
    for name in reversed(blocks):
        program.op("g", name, f"x{name}")
        program.drop(f"x{name}")
    program.drop("g")
    _core.step()


def plan_of(
    known: Sequence[Tensor], blocks: Sequence[str] = BLOCKS, **changes: object
) -> dict[str, Any]:
    """The plan of that step; weights first, then the activations, then the gradient."""
    tensors = [*known] + [Tensor(kind="transient")] * (len(blocks) + 1)
    ops: list[list[int]] = []
    x = {name: len(BLOCKS) + i for i, name in enumerate(blocks)}
    g = len(tensors) - 1
    last: list[int] = []
    for name in blocks:
        ops.append([*last, BLOCKS.index(name), x[name]])
        last = [x[name]]
    ops.append([*last, g])
    ops += [[g, BLOCKS.index(name), x[name]] for name in reversed(blocks)]
    return columns(tensors, ops, **changes)


def test_a_block_that_is_left_out_costs_no_miss(program: Program) -> None:
    _core.install_plan(plan_of(weights(program, BLOCKS)))
    residual(program, "abcd")
    assert counted() == (9, 0)
    assert _core.plan_status()["complete"] == 1
    residual(program, "acd")
    assert counted() == (9 + 7, 0)
    assert _core.plan_status()["complete"] == 0  # it was not as planned
    residual(program, "abcd")
    assert counted() == (9 + 7 + 9, 0)
    assert _core.plan_status()["complete"] == 1


def test_a_step_of_another_length_follows_the_plan_and_is_not_complete(program: Program) -> None:
    _core.install_plan(plan_of(weights(program, BLOCKS)))
    for mib, complete in ((4, 1), (6, 0), (4, 1)):
        before = counted()[0]
        residual(program, "abcd", mib)
        assert counted() == (before + 9, 0)
        assert _core.plan_status()["complete"] == complete


def test_a_block_that_the_plan_has_not_misses_by_itself(program: Program) -> None:
    _core.install_plan(plan_of(weights(program, BLOCKS), "abd"))
    residual(program, "abcd")
    # The op of `c` in each direction.
    assert counted() == (7, 2)
    residual(program, "abd")
    assert counted() == (14, 2)


def test_moves_go_on_after_a_block_that_is_left_out(program: Program) -> None:
    # Weight `d` leaves at the start; it returns when `b` has ended, which is left out.
    plan = plan_of(weights(program, BLOCKS), evict=[[-1, 3]], fetch=[[1, 3, 3]])
    _core.install_plan(plan)
    assert program.away() == {"d"}
    program.take("xa")
    program.op("a", "xa")
    assert program.away() == {"d"}
    program.take("xc")
    program.op("xa", "c", "xc")
    assert program.away() == set()
    for name in ("xa", "xc"):
        program.drop(name)
    assert counted() == (2, 0)


def test_the_one_that_was_right_all_along_acts(program: Program) -> None:
    known = weights(program, BLOCKS)
    whole = _core.install_plan(plan_of(known))
    short = _core.install_plan(plan_of(known, "acd"))
    for _ in range(2):
        residual(program, "acd")
        assert _core.plan_status()["complete"] == short
        residual(program, "abcd")
        assert _core.plan_status()["complete"] == whole
    assert counted()[1] == 0


def used_in_turn(program: Program, *ops: str) -> None:
    """Install a plan: `a`, blocks x, y and z of three sizes one by one, and then these ops."""
    sizes = {"x": 2, "y": 4, "z": 6}
    made = [Tensor(mib=mib, kind="transient") for mib in sizes.values()]
    of_op = [["axyz".index(name) for name in op] for op in ops]
    _core.install_plan(columns([*weights(program, "a"), *made], [[0], [1], [2], [3], *of_op]))
    program.op("a")
    for name, mib in sizes.items():
        program.take(name, mib)
        program.op(name)
    assert counted() == (4, 0)


def test_an_op_that_looks_alike_by_chance_is_no_place(program: Program) -> None:
    used_in_turn(program, "xy", "yz", "a")
    program.op("y", "z")  # like one later op; without a persistent tensor that proves nothing
    assert counted() == (4, 1)
    program.op("a")
    assert counted() == (5, 1)
    _core.step()
    assert _core.plan_status()["complete"] == 0


def test_two_that_look_alike_in_a_row_are_a_place(program: Program) -> None:
    used_in_turn(program, "xy", "yz", "xz", "a")
    program.op("y", "z")
    assert counted() == (4, 1)
    program.op("x", "z")
    program.op("a")
    assert counted() == (6, 1)


def test_ops_on_small_blocks_between_two_make_no_difference(program: Program) -> None:
    small = _core.allocate(1000)
    segment = Tensor(mib=2, address=small // PAGE * PAGE)
    made = [Tensor(mib=mib, kind="transient") for mib in (2, 4, 6)]
    ops = [[0], [1], [2], [3], [1, 2], [4], [1, 3], [1, 2], [2, 3], [0]]
    _core.install_plan(
        columns([*weights(program, "a"), *made, segment], ops, segment=[0, 0, 0, 0, 1])
    )
    program.op("a")
    for name, mib in zip("xyz", (2, 4, 6), strict=True):
        program.take(name, mib)
        program.op(name)
    program.op("x", "y")
    _core.op_end(_core.op_begin([small], "", ""), "")
    assert counted() == (6, 0)
    program.op("y", "z")  # the ops after the second op on x and y, too
    assert counted() == (7, 0)
    program.op("a")
    assert counted() == (8, 0)
    assert _core.release(small)


def test_an_op_on_other_tensors_of_these_sizes_is_the_next_one(program: Program) -> None:
    made = [Tensor(kind="transient")] * 2
    _core.install_plan(columns([*weights(program, "a"), *made], [[0], [1], [2], [1], [0, 2]]))
    program.op("a")
    for name in "xy":
        program.take(name)
        program.op(name)
    program.op("y")
    program.op("a", "x")
    assert counted() == (5, 0)
    _core.step()
    assert _core.plan_status()["complete"] == 0


def test_what_was_allocated_and_freed_before_an_op_belongs_to_it(program: Program) -> None:
    tensors = [*weights(program, "ab"), *[Tensor(kind="transient")] * 2]
    _core.install_plan(columns(tensors, [[0], [1, 2], [0]], allocations=[3, 2], allocated=[1, 1]))
    program.op("b")  # lost
    program.take("x")
    program.drop("x")
    program.take("y")
    program.op("b", "y")
    assert counted() == (1, 1)
    program.op("a")
    _core.step()
    assert counted() == (2, 1)


# --- any program, any plan

WEIGHTS = "abcd"
Kernel = tuple[
    str, tuple[int, ...], int
]  # a weight or none, which blocks (from the last), MiB made


def kernels() -> st.SearchStrategy[list[Kernel]]:
    weight = st.sampled_from(["", *WEIGHTS])
    blocks = st.lists(st.integers(0, 3), max_size=2, unique=True).map(tuple)
    return st.lists(
        st.tuples(weight, blocks, st.sampled_from([0, 0, 2, 4])), min_size=1, max_size=10
    )


def perform(program: Program, step: Sequence[Kernel]) -> list[list[str]]:
    """Run the step; at most four blocks live at once. Return the names that each op uses."""
    alive: list[str] = []
    used: list[list[str]] = []
    for number, (weight, blocks, mib) in enumerate(step):
        names = [weight] * bool(weight) + [alive[-1 - i] for i in blocks if i < len(alive)]
        if mib:
            names.append(f"x{number}")
            program.take(names[-1], mib)
            alive.append(names[-1])
        if names:
            program.op(*names)
            used.append(names)
        if len(alive) > 4:
            program.drop(alive.pop(0))
    for name in alive:
        program.drop(name)
    _core.step()
    return used


@st.composite
def moves(draw: st.DrawFn, ops: int, tensors: int) -> dict[str, Any]:
    op, tensor = st.integers(0, ops - 1), st.integers(0, tensors - 1)
    fetches = [
        [after, after + draw(st.integers(1, ops)), draw(tensor)]
        for after in draw(st.lists(op, max_size=6))
    ]
    return {
        "evict": [[draw(op), draw(tensor)] for _ in range(draw(st.integers(0, 8)))],
        "fetch": [[a, b, t] for a, b, t in fetches if b < 2 * ops],
        "gated": draw(st.integers(0, 1)),
        "capacity": draw(st.sampled_from([8, 16, 1 << 20])) * MIB,
        "order": draw(st.integers(0, 2)),
    }


@settings(max_examples=150)
@given(kernels(), st.data())
def test_any_program_may_wander_from_any_plan(planned: list[Kernel], data: st.DataObject) -> None:
    with running(options(budget=24 * MIB)) as program:
        known = weights(program, WEIGHTS)
        used = perform(program, planned)
        assume(used)
        names = [*WEIGHTS, *dict.fromkeys(n for op in used for n in op if n not in WEIGHTS)]
        made = [Tensor(planned[int(name[1:])][2], "transient") for name in names[len(WEIGHTS) :]]
        ops = [[names.index(name) for name in dict.fromkeys(op)] for op in used]
        plans = data.draw(st.integers(1, 3))
        for _ in range(plans):
            changes = data.draw(moves(len(ops), len(names)))
            _core.install_plan(columns([*known, *made], ops, **changes))
        for _ in range(4):
            step = list(planned)
            for _ in range(data.draw(st.integers(0, 4))):
                at = data.draw(st.integers(0, len(step)))
                if data.draw(st.booleans()):
                    del step[at : at + data.draw(st.integers(1, 3))]
                else:
                    step[at:at] = data.draw(kernels())
            perform(program, step)  # which reads the blocks' contents
            status = _core.plan_status()
            assert len(status["plans"]) == plans
        perform(program, planned)
        perform(program, planned)
        assert _core.plan_status()["misses"] == 0
        assert _core.plan_status()["complete"] > 0
