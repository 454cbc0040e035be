"""Malformed plans, and well-formed ones with arbitrary content."""

from __future__ import annotations

from typing import Any

import _core_testing
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planned import MIB, PAGE, Program, Tensor, columns, options, weights

from umem import _core
from umem.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_ops": 0}, "n_ops"),
        ({"n_ops": 1 << 70}, "64 bits"),
        ({"n_ops": 3}, "access_start.*3 values.*4"),
        ({"bytes": [4 * MIB, 0]}, "bytes.*0 at 1"),
        ({"bytes": [4 * MIB, PAGE + 1]}, "multiple of the page"),
        ({"kind": [0]}, "kind.*1 values.*2"),
        ({"kind": [0, 4]}, "kind.*4 at 1"),
        ({"next_alias": [-1, 0]}, "next_alias.*tensor 1"),
        ({"next_alias": [-1, 2]}, "next_alias.*2 at 1"),
        ({"address": [0]}, "address"),
        ({"allocations": [1, 1], "allocated": [0, 0]}, "twice"),
        ({"allocations": [1]}, "allocated.*0 values"),
        ({"allocations": [1], "allocated": [2]}, "allocated.*2 at 0"),
        ({"allocations": [0, 1], "allocated": [1, 0]}, "allocated.*ascend"),
        ({"access_start": [0, 2, 2]}, "op 1 has no access"),
        ({"access_start": [0, 3, 2]}, "op 1 has no access"),
        ({"access_start": [1, 2, 2]}, "does not lead"),
        ({"access_tensor": [0, 2]}, "access_tensor.*2 at 1"),
        ({"access_start": [0, 2, 3], "access_tensor": [1, 1, 0]}, "tensor 1 is there twice"),
        ({"evict": [[2, 0]]}, "evict_after.*2 at 0"),
        ({"cold": [[-2, 0]]}, "cold_after.*-2"),
        ({"fetch": [[0, 4, 0]]}, "fetch_by.*4"),
        ({"fetch": [[1, 1, 0]]}, "fetch_by.*not after"),
        ({"fetch": [[0, 1, -1]]}, "fetch_tensor.*-1"),
        ({"fetch_by": [1]}, "fetch_by.*1 values"),
        ({"copy": [[2, 3, 0]]}, "copy_after.*2 at 0"),
        ({"copy": [[0, 5, 0]]}, "copy_until.*5"),
        ({"copy": [[1, 1, 0]]}, "copy_until.*not after"),
        ({"copy": [[0, 1, 2]]}, "copy_tensor.*2 at 0"),
        ({"keep": [2]}, "keep"),
        ({"waits": [2]}, "waits"),
        ({"read_mostly": [2]}, "read_mostly.*2 at 0"),
        ({"kind": [0, 1], "read_mostly": [0, 1]}, "read_mostly.*tensor 1 is not persistent"),
        ({"gated": 1, "occupancy": [0]}, "occupancy.*1 values.*2"),
        ({"gated": 2}, "gated"),
        ({"order": 3}, "order"),
        ({"window": -1}, "window"),
        ({"headroom": -1}, "headroom"),
        ({"unheard_of": 1}, "unheard_of.*not known"),
    ],
)
def test_a_bad_plan_is_refused(program: Program, changes: dict[str, object], reason: str) -> None:
    tensors = weights(program, "ab")
    plan = columns(tensors, [[0], [1]], **changes)
    with pytest.raises(ConfigError, match=reason):
        _core.install_plan(plan)
    assert _core.plan_status()["plans"] == []


def test_a_plan_of_other_types_is_refused(program: Program) -> None:
    good = columns(weights(program, "ab"), [[0], [1]])
    for name, value, reason in (
        ("bytes", np.zeros(2, np.float64), "int64"),
        ("bytes", [1, 2], "int64"),
        ("bytes", np.zeros((2, 2), np.int64), "one dimension"),
        ("order", "lru", "whole number"),
    ):
        with pytest.raises(ConfigError, match=f"'{name}'.*{reason}"):
            _core.install_plan(good | {name: value})
    for name in good:
        with pytest.raises(ConfigError, match=f"'{name}' is missing"):
            _core.install_plan({key: good[key] for key in good if key != name})


TENSORS = 6
INDEX = st.integers(0, TENSORS - 1)


@st.composite
def kinds(draw: st.DrawFn) -> list[str]:
    """The columns of all tensors; the last one may be carried over from number 1."""
    found = [draw(st.sampled_from(["persistent", "transient"])) for _ in range(TENSORS)]
    if draw(st.booleans()):
        found[1], found[5] = "made", "carried"
    return found


@st.composite
def nonsense(draw: st.DrawFn) -> dict[str, object]:
    """A plan's content: well formed, and otherwise arbitrary."""
    ops = draw(
        st.lists(st.lists(INDEX, min_size=1, max_size=3, unique=True), min_size=1, max_size=8)
    )
    n = len(ops)
    after = st.integers(-1, n - 1)
    moves = st.lists(st.tuples(after, INDEX), max_size=12)
    by = st.tuples(after, st.integers(0, 2 * n - 1), INDEX).filter(lambda row: row[1] > row[0])
    gated = draw(st.integers(0, 1))
    return {
        "ops": ops,
        "evict": draw(moves),
        "cold": draw(moves),
        "fetch": draw(st.lists(by, max_size=12)),
        "copy": draw(st.lists(by, max_size=8)),
        "gated": gated,
        "occupancy": [draw(st.integers(0, 20)) * MIB for _ in ops] if gated else [],
        "capacity": draw(st.integers(0, 20)) * MIB,
        "keep": draw(st.lists(INDEX, max_size=3)),
        "waits": draw(st.lists(after, max_size=3)),
        "read_mostly": draw(st.lists(INDEX, max_size=3)),
        "order": draw(st.integers(0, 2)),
        "window": draw(st.integers(0, 5)),
        "headroom": draw(st.sampled_from([0, 0, 4 * MIB, 64 * MIB])),
    }


def in_step(kind: str) -> bool:
    return kind in ("transient", "made")


def run_step(program: Program, kinds: list[str], ops: list[list[int]], leave: int) -> None:
    """A step as a plan has it, but for op number `leave`; every use is checked and changed."""
    for t, kind in enumerate(kinds):
        if in_step(kind):
            program.take(f"{t}")
    for i, op in enumerate(ops):
        names = [f"{t}" for t in op if f"{t}" in program.at]
        if i == leave:
            program.take("stray", 2)
            program.op("stray", *names)
            program.drop("stray")
        else:
            program.op(*names)
        for name in names:
            program.check(name)
            program.fill(name)
        budget = _core.stats()["budget_bytes"]
        assert _core.stats()["resident_bytes"] <= budget
        rows = _core_testing.blocks()
        held = [row["bytes"] for row in rows if row["state"] in ("device", "dead")]
        assert sum(held) <= budget
    for t, kind in enumerate(kinds):
        if kind == "transient":
            program.drop(f"{t}")
    if kinds[5] == "carried":
        program.drop("5")
        program.rename("1", "5")
    _core.step()


@settings(max_examples=80)
@given(
    kinds=kinds(),
    plans=st.lists(nonsense(), min_size=1, max_size=3),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(-6, 8)), max_size=6),
    budget=st.sampled_from([8, 12, 16]),
)
def test_no_plan_loses_bytes_or_exceeds_the_budget(
    kinds: list[str], plans: list[dict[str, Any]], steps: list[tuple[int, int]], budget: int
) -> None:
    _core.start(options(budget * MIB))
    program = Program()
    try:
        tensors = [
            Tensor(kind=kind, address=0 if in_step(kind) else program.take(f"{t}"))
            for t, kind in enumerate(kinds)
        ]
        if kinds[5] == "carried":
            tensors[5] = tensors[5]._replace(next_alias=1)
        for plan in plans:
            persistent = [t for t in plan["read_mostly"] if kinds[t] == "persistent"]
            plan = {**plan, "read_mostly": persistent}
            _core.install_plan(columns(tensors, **plan))
        for which, leave in steps:
            ops = plans[which % len(plans)]["ops"]
            run_step(program, kinds, ops, leave)
    finally:
        program.clear()
