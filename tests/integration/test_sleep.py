"""Sleep and wake of a PyTorch program on the software device, and budgets that follow."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import _core_testing
import pytest
import torch
from support import forkserver

import umem
from umem.base.native import core
from umem.base.units import MIB
from umem.errors import ConfigError, OutOfMemoryError, StateError
from umem.monitor import server
from umem.session import auto_budget

ROOT = Path(__file__).resolve().parents[2]


def free_mib() -> int:
    (memory,) = core.device_memory()
    return memory["free_bytes"] // MIB


@pytest.fixture
def on() -> Iterator[None]:
    with umem.enable(device="soft:64MiB", budget="64MiB"):
        yield


def nothing(_: object) -> None:
    """Neither of the two."""


def training(
    sleeps: Callable[[int], None], begins: Callable[[torch.nn.Sequential], None] = nothing
) -> list[torch.Tensor]:
    """The weights after some steps; `sleeps` is called between them, `begins` with the net."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(768, 768) for _ in range(4)))
    begins(net)
    optimizer = torch.optim.Adam(net.parameters())
    data = torch.randn(32, 768)
    for i in range(6):
        optimizer.zero_grad(set_to_none=False)
        net(data).square().mean().backward()
        optimizer.step()
        sleeps(i)
    return [weight.detach().clone() for weight in net.parameters()]


def test_who_came_back_and_left_for_another_reason_sleeps_no_longer(on: None) -> None:
    used, left = torch.ones(2 * MIB), torch.ones(2 * MIB)
    asleep = umem.sleep()
    used.add_(1)
    umem.evict(used)  # as pressure or a plan may
    assert umem.stats().asleep_bytes == left.nbytes
    assert asleep.wake() == left.nbytes
    assert umem.where(used).evicted_bytes == used.nbytes
    assert umem.where(left).resident_bytes == left.nbytes


@pytest.mark.parametrize("budget", ["64MiB", "24MiB"])
@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_training_that_sleeps_gives_the_same_bits(budget: str, policy: str) -> None:
    plain = training(lambda i: None)
    freed = []

    def between(i: int) -> None:
        if i % 2:
            umem.sleep()
            freed.append(free_mib())
            if i % 3 == 0:
                umem.wake()
        else:
            umem.sleep(["grad"], keep="discard")  # zeroed at the next step's start
            umem.sleep(tags="optimizer")

    with umem.enable(budget=budget, device="soft", policy=policy):
        slept = training(between)
        total = core.device_memory()[0]["total_bytes"] // MIB
        assert freed == [total] * 3
        assert umem.stats().hook_errors == 0
        equal = [torch.equal(a, b) for a, b in zip(plain, slept, strict=True)]
        del slept
        gc.collect()
    assert all(equal)


@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_what_is_kept_sleeps_too_and_is_there_again(policy: str) -> None:
    plain = training(nothing)
    kept: list[torch.nn.Module] = []

    def begins(net: torch.nn.Sequential) -> None:
        kept.append(net[0])
        assert umem.keep(net[0])

    def between(_: int) -> None:
        assert umem.where(kept[0].weight).resident_bytes == kept[0].weight.nbytes
        with umem.sleep():
            assert umem.where(kept[0].weight).evicted_bytes == kept[0].weight.nbytes
            assert free_mib() == 64
            assert umem.stats().pinned_bytes == 6 * MIB  # whole pages, and one of small tensors
        with pytest.raises(StateError, match="pinned"):
            umem.evict(kept[0])

    with umem.enable(budget="24MiB", device="soft:64MiB", policy=policy):
        slept = training(between, begins)
        kept.clear()
        assert all(torch.equal(a, b) for a, b in zip(plain, slept, strict=True))
        del slept
        gc.collect()


@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_sleeps_inside_of_steps_give_the_same_bits(policy: str) -> None:
    plain = training(nothing)
    slept_in: list[int] = []

    def begins(net: torch.nn.Sequential) -> None:
        def sleeps(*_: object) -> None:
            slept_in.append(umem.sleep().bytes)
            if len(slept_in) % 3 == 0:
                umem.wake()

        net[1].register_forward_hook(sleeps)
        net[2].register_full_backward_hook(sleeps)

    with umem.enable(budget="24MiB", device="soft", policy=policy):
        slept = training(nothing, begins)
        assert len(slept_in) == 12
        assert min(slept_in) > 0
        assert all(torch.equal(a, b) for a, b in zip(plain, slept, strict=True))
        del slept
        gc.collect()


def test_pointers_and_views_stay(on: None) -> None:
    x = torch.arange(4 * MIB // 4, dtype=torch.float32)
    view, where = x[1000:2000], x.data_ptr()
    array = x.numpy()
    with umem.sleep() as asleep:
        assert asleep.bytes >= 4 * MIB
        assert "MiB released" in repr(asleep)
        assert umem.stats().resident_bytes == 0
        assert view[5] == 1005  # an op on demand
        assert array[7] == 7  # and an access that is not one
    assert umem.stats().asleep_bytes == 0
    assert (x.data_ptr(), view.data_ptr()) == (where, where + 4000)
    assert float(x.sum(dtype=torch.float64)) == (1 << 20) * ((1 << 20) - 1) / 2


def test_nested_sleeps_wake_their_own(on: None) -> None:
    weight = torch.nn.Parameter(torch.ones(1 << 20))
    x = torch.ones(1 << 20)
    core.tag(weight.data_ptr(), "param")
    with umem.sleep(["param"]):
        with umem.sleep():
            assert umem.stats().asleep_bytes == 8 * MIB
        assert umem.stats().asleep_bytes == 4 * MIB
        assert umem.wake(["param"]) == 4 * MIB
        assert umem.stats().asleep_bytes == 0
    assert float((weight.detach() + x).sum()) == 2 << 20


def test_what_is_refused_says_why_and_moves_nothing(on: None) -> None:
    x = torch.ones(1 << 20)
    for call, words in (
        (lambda: umem.sleep(keep="disc"), "allowed: host, discard"),
        (lambda: umem.sleep(keep="discard"), "needs tags"),
        (lambda: umem.sleep(["pool"], keep="discard"), "small tensors of all kinds"),
        (lambda: umem.sleep(["kv"]), "'kv'; allowed: param, grad"),
        (lambda: umem.sleep([]), "no tag; allowed"),
        (lambda: umem.wake("kv"), "umem.wake"),
        (lambda: umem.wake(3), "allowed: a list of tags"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=words):
            call()
    umem.set_budget("64MiB", host_budget="2MiB")
    with pytest.raises(OutOfMemoryError, match="host budget"):
        umem.sleep()
    assert umem.stats().resident_bytes >= x.nbytes
    assert umem.stats().bytes_out == 0


def test_between_the_ops_of_a_backward_pass(on: None) -> None:
    x = torch.ones(1 << 20, requires_grad=True)
    given_back = []

    class Sleepy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            given_back.append(umem.sleep().bytes)
            return grad * 2

    Sleepy.apply(x).sum().backward()
    assert x.grad is not None
    assert float(x.grad.sum()) == 2 << 20
    assert len(given_back) == 1
    assert given_back[0] >= x.nbytes


def test_off_is_an_error() -> None:
    for call in (umem.sleep, umem.wake):
        with pytest.raises(StateError, match=r"umem\.enable"):
            call()


def test_a_budget_of_auto_gives_way_to_others_and_grows_again() -> None:
    with umem.enable(device="soft:64MiB", policy="lru"):
        x = [torch.full((1 << 20,), float(i)) for i in range(14)]
        assert umem.stats().budget_bytes == 64 * MIB

        def step() -> int:
            time.sleep(auto_budget.EVERY_S * 1.1)
            umem.step()
            return umem.stats().budget_bytes // MIB

        assert step() == 64
        umem.evict(x[0])
        result, other = _core_testing.cuMemAlloc(12 * MIB)  # by another owner
        assert result == 0
        assert [step(), step()] == [52, 52]
        assert float(x[0][0] + x[5][0]) == 5  # back, and others leave for it
        (memory,) = core.device_memory()
        assert 48 * MIB <= memory["held_bytes"] <= 52 * MIB
        assert _core_testing.cuMemFree(other) == 0
        grown = [step() for _ in range(auto_budget.PATIENCE)]
        assert grown == [52] * (auto_budget.PATIENCE - 1) + [64]
        assert all(float(t[0]) == i for i, t in enumerate(x))
        del x
        gc.collect()


def test_a_budget_that_was_set_follows_nothing() -> None:
    with umem.enable(device="soft:64MiB", policy="lru"):
        umem.set_budget("32MiB")
        result, other = _core_testing.cuMemAlloc(48 * MIB)
        assert result == 0
        time.sleep(auto_budget.EVERY_S * 1.1)
        umem.step()
        assert umem.stats().budget_bytes == 32 * MIB
        assert _core_testing.cuMemFree(other) == 0


def test_the_option_top_serves_while_umem_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with umem.enable(device="soft", budget="64MiB", top="on"):
        x = torch.ones(1 << 20)
        (path,) = server.running()
        answer = server.ask(path)
        assert answer["stats"]["live_bytes"] == x.nbytes
        assert answer["tags"]["input"]["resident_bytes"] == x.nbytes
        assert answer["device"].startswith("soft:")
        del x
    assert server.running() == []
    with pytest.raises(ConfigError, match="UMEM_TOP"):
        umem.enable(device="soft", budget="64MiB", top=tmp_path / "none" / "x.sock")
    assert not umem.is_enabled()


def test_the_example_shows_equal_checksums(tmp_path: Path) -> None:
    words = [str(ROOT / "examples" / "sleep_wake.py")]
    done = forkserver.run(words, {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    free = {line.split()[0]: float(line.split()[1]) for line in lines[:3]}
    assert free["asleep"] == 96
    assert free["before"] < 96
    assert free["awake"] < 96
    assert "equal checksums" in lines
