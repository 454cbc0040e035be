from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from umem.base.replaced import Replaced


class Owner:
    def named(self, value: int, *, more: int = 0) -> int:
        """Its own text."""
        return value + more


def doubled(original: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * int(original(*args, **kwargs))


@pytest.fixture
def owner() -> Any:
    return type("Owner", (Owner,), {"named": Owner.named})


def test_the_function_is_replaced_until_the_removal(owner: Any) -> None:
    before = owner.named
    replaced = Replaced(owner, "named", doubled)
    assert owner().named(2, more=1) == 6
    assert (owner.named.__name__, owner.named.__doc__) == ("named", "Its own text.")
    replaced.remove()
    assert owner.named is before
    assert owner().named(2, more=1) == 3


def test_a_wrapper_of_the_program_remains_and_calls_the_original(owner: Any) -> None:
    replaced = Replaced(owner, "named", doubled)
    inner = owner.named
    owner.named = lambda self, value: inner(self, value) + 100
    assert owner().named(1) == 102
    replaced.remove()
    assert owner().named(1) == 101


def test_two_are_removed_in_either_order() -> None:
    for order in ((0, 1), (1, 0)):
        module = SimpleNamespace(function=lambda value: value)
        both = [Replaced(module, "function", doubled) for _ in range(2)]
        assert module.function(1) == 4
        both[order[0]].remove()
        assert module.function(1) == 2
        both[order[1]].remove()
        assert module.function(1) == 1
