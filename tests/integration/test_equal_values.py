"""Value numbers against the values themselves, with views, writes and random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from umem.capture import op_semantics  # noqa: E402
from umem.lint.value_numbering import Values  # noqa: E402


class Numbering(TorchDispatchMode):
    """Numbers the values of real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.values = Values()
        self.kept: dict[int, Any] = {}  # alive, so that no storage is reused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        operator = op_semantics.describe(func)
        before = {self.block(tensor) for tensor in op_semantics.tensors([*args, *named.values()])}
        out = func(*args, **named)
        made = [t for t in op_semantics.tensors([out]) if self.block(t) not in before]
        changed = [*op_semantics.tensors(operator.written(args, named))]
        if not operator.makes_empty and (made or changed):
            self.values.note(func, (args, named), [*made, *changed], self.block, 0)
        return out

    def block(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self.kept.setdefault(storage._cdata, storage)
        return int(storage._cdata)


def _foreach(a: Any, b: Any) -> Any:
    torch._foreach_add_([a, b], 1)
    return a


MAKE: list[Callable[[], Any]] = [
    lambda: torch.zeros(4, 4), lambda: torch.ones(4, 4), lambda: torch.full((4, 4), -0.0),
    lambda: torch.arange(16.0).view(4, 4), lambda: torch.rand(4, 4), lambda: torch.empty(4, 4),
    lambda: torch.empty(4, 4).fill_(1), lambda: torch.ones(4, 4, dtype=torch.float64).float(),
]  # fmt: skip
CHANGE: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b, lambda a, b: a * 2, lambda a, b: a + 1, lambda a, b: a + True,
    lambda a, b: a.relu(), lambda a, b: a.t(), lambda a, b: a.clone(), lambda a, b: a.t().clone(),
    lambda a, b: a[:2].repeat(2, 1), lambda a, b: a.add_(1), lambda a, b: a[1:].mul_(3),
    lambda a, b: a[:3].mul_(3), lambda a, b: a.copy_(b.clone()),
    lambda a, b: a[0].copy_(b[1].clone()),
    lambda a, b: a.uniform_(), lambda a, b: torch.dropout(a, 0.5, True), lambda a, b: a.zero_(),
    _foreach, lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: a.tril(), lambda a, b: a.copysign(b),
]  # fmt: skip
EQUAL: list[int] = []

_step = st.tuples(st.integers(0, len(MAKE) + len(CHANGE) - 1), st.integers(0, 5), st.integers(0, 5))


@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(st.lists(_step, min_size=2, max_size=14))
def test_equal_numbers_mean_equal_bytes(steps: list[tuple[int, int, int]]) -> None:
    tensors = [torch.ones(4, 4), torch.ones(4, 4)]
    with Numbering() as numbering:
        for which, first, second in steps:
            if which < len(MAKE):
                tensors.append(MAKE[which]())
            else:
                operands = (tensors[-1 - index % len(tensors)] for index in (first, second))
                out = CHANGE[which - len(MAKE)](*operands)
                tensors += [out] if out.shape == (4, 4) else []  # the part's writer
    for one, other in itertools.combinations(numbering.kept, 2):
        if numbering.values.of(one) == numbering.values.of(other):
            EQUAL.append(1)
            first, second = (bytes(numbering.kept[i]) for i in (one, other))
            assert first == second


def test_some_numbers_were_equal() -> None:
    if not EQUAL:
        pytest.skip("the test before did not run")
    assert len(EQUAL) > 20  # 49 to 180 by the seed of the examples


def test_the_same_history_is_the_same_value_and_no_other_is() -> None:
    with Numbering() as numbering:
        some = [torch.ones(8, 8).tril() for _ in range(3)]
        wider = torch.ones(8, 8).tril(1)
        drawn = [torch.rand(8, 8) for _ in range(2)]
        some[2].add_(1)
        numbers = [numbering.values.of(numbering.block(t)) for t in (*some, wider, *drawn)]
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 5
