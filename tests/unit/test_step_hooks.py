"""Hooks around the steps of all optimizers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402

import umem  # noqa: E402
from umem.base.step_hooks import Hook, after_steps, before_steps  # noqa: E402


@pytest.mark.parametrize("register", [before_steps, after_steps])
def test_hooks_may_come_and_go_while_a_step_is_under_way(register: Any) -> None:
    called: list[str] = []

    def named(name: str) -> Hook:
        return lambda *_: called.append(name)

    def first(*_: object) -> None:
        called.append("first")
        handles[1].remove()
        handles.append(register(named("late")))

    handles = [register(hook) for hook in (first, named("removed"), named("last"))]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    optimizer.step()
    assert called == ["first", "last"]
    handles[0].remove()
    handles[0].remove()  # a second time changes nothing
    optimizer.step()
    assert called == ["first", "last", "last", "late"]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(called) == 4


def test_umem_may_be_turned_off_in_a_hook_of_the_programs() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(2)
    umem.enable(budget="64MiB", device="soft", policy="lru", optimizer="host")
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: umem.disable()),
        register_optimizer_step_pre_hook(lambda *_: None),
    ]
    optimizer.step()
    for hook in hooks:
        hook.remove()
    assert not umem.is_enabled()
    assert weight.tolist() == [0.0, 0.0]
