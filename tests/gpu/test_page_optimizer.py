"""Optimizer state of CUDA tensors: its location around the step. Values: tests/integration."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402
from umem.errors import StateError  # noqa: E402

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _without_plans() -> Iterator[None]:
    with umem.enable(budget="64MiB", device="cuda", policy="lru"):
        yield
        gc.collect()
        assert umem.stats().live_bytes == 0


def parameters(device: str = "cuda") -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.zeros(MIB, device=device)) for _ in range(4)]
    for p in made:
        p.grad = torch.zeros_like(p)
    return made


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_states_are_out_after_each_step(how: dict[str, bool]) -> None:
    umem.set_budget("56MiB")  # 32 MiB of parameters and gradients, 32 of states
    optimizer = torch.optim.Adam(parameters(), **how)
    with umem.page_optimizer(optimizer) as paged:
        for _ in range(3):
            optimizer.step()
            torch.cuda.synchronize()
            rows = umem.tensors(states(optimizer))
            assert [row.evicted_bytes for row in rows] == [4 * MIB] * 8
        before = umem.stats().bytes_in
        optimizer.step()
        assert umem.stats().bytes_in - before <= 40 * MIB
        assert "Adam" in repr(paged)


def test_gradients_of_a_backward_pass_are_released() -> None:
    made = parameters()
    optimizer = torch.optim.Adam(made)
    optimizer.zero_grad()
    with umem.page_optimizer(optimizer, release_gradients=True):
        sum(p.sum() for p in made).backward()
        torch.cuda.synchronize()
        assert all(p.grad is None for p in made)
        assert all(row.evicted_bytes == 4 * MIB for row in umem.tensors(states(optimizer)))
        with pytest.raises(StateError, match="second gradient"):
            made[0].sum().backward()
        made[0].grad = None
        optimizer.step()
        made[0].sum().backward()
    torch.ones(1, requires_grad=True).sum().backward()  # releases the pass that raised


def test_a_capture_leaves_the_states_alone() -> None:
    umem.set_budget("128MiB")
    optimizer = torch.optim.Adam(parameters(), capturable=True)
    umem.page_optimizer(optimizer)
    optimizer.step()
    umem.prefetch(states(optimizer))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        optimizer.step()
    assert all(row.evicted_bytes == 0 for row in umem.tensors(states(optimizer)))
    graph.replay()
    torch.cuda.synchronize()
    graph.reset()


def test_cpu_parameters_are_not_umems_here() -> None:
    optimizer = torch.optim.Adam([*parameters("cpu"), *parameters()])
    umem.page_optimizer(optimizer)
    optimizer.step()
    held = [row.held for row in umem.tensors(states(optimizer))]
    assert held == [False] * 8 + [True] * 8
    assert all(row.resident_bytes == 0 for row in umem.tensors(states(optimizer)))
