"""The description of operators: its lists fit torch, and the native list is generated from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import generate_overwrites
import pytest
import torch

from umem.capture.op_semantics import OVERWRITES, describe

ROOT = Path(__file__).resolve().parents[2]
aten: Any = torch.ops.aten


@pytest.mark.parametrize("file", generate_overwrites.FILES)
def test_the_native_list_is_up_to_date(file: str) -> None:
    text = (ROOT / "src" / "torch_ext" / file).read_text()
    assert text == generate_overwrites.render(file), "run `python tools/generate_overwrites.py`"


@pytest.mark.parametrize("name", sorted(OVERWRITES))
def test_torch_has_what_is_said_to_overwrite_and_it_writes_its_first_argument(name: str) -> None:
    packet = getattr(aten, name)
    described = [describe(getattr(packet, overload)) for overload in packet.overloads()]
    in_place = [op for op in described if op.writes[:1] == ((0, "self"),)]
    assert in_place
    assert all(op.overwrites and op.bare == name for op in in_place)


def test_what_a_call_writes_is_found_by_position_and_by_name() -> None:
    out, x = torch.zeros(2), torch.ones(2)
    assert [*describe(aten.add.out).written((x, x), {"out": out})] == [out]
    assert [*describe(aten.add_.Tensor).written((x, out), {})] == [x]
    assert [*describe(aten.add.Tensor).written((x, out), {})] == []
    lists = describe(aten._foreach_add_.Scalar)
    assert [id(t) for t in lists.written(([x, out], 1), {})] == [id(x), id(out)]


@pytest.mark.parametrize(
    "op", [aten.native_batch_norm.default, aten._native_batch_norm_legit.default]
)
def test_statistics_are_written_in_training_only(op: Any) -> None:
    x, weight, bias, mean, var = (torch.ones(2) for _ in range(5))
    told = describe(op)
    for training, expected in ((True, {id(mean), id(var)}), (False, set())):
        written = told.written_now((x, weight, bias, mean, var, training, 0.1, 1e-5), {})
        assert {id(t) for t in written} == expected


def test_random_operators_and_those_that_must_not_run_again() -> None:
    assert describe(aten.native_dropout.default).random
    assert not describe(aten.relu.default).random
    assert describe(aten.relu.default).repeatable
    assert not describe(aten.resize_.default).repeatable
    assert not describe(aten.empty.memory_format).repeatable
    assert not describe(torch.ops.prims.add.default).repeatable


def test_arguments_that_a_call_leaves_out_are_not_written() -> None:
    x = torch.ones(2)
    assert [*describe(aten.add_.Tensor).written((), {"other": x})] == []
    assert [*describe(aten.add_.Tensor).written_now((), {"self": x, "other": x})] == [x]


def test_a_higher_order_operator_has_a_name_only() -> None:
    told = describe(torch.ops.higher_order.cond)
    assert told.name == "higher_order::cond"
    assert not told.repeatable
    assert [*told.written((torch.ones(2),), {})] == []
