"""The option `optimizer`, and `page_optimizer(update="auto")`: who updates, and by which bits."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402
from umem.base import device_profiles  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.errors import ConfigError  # noqa: E402
from umem.session import host_share, session  # noqa: E402

SIDE = 1024
STEPS = 12
Make = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def made(make: Make = adamw) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE) for _ in range(6)))
    return net, make(net.parameters())


def run(
    net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS
) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(32, SIDE)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def on_host(optimizer: torch.optim.Optimizer) -> list[bool]:
    """Of each large state, whether it is outside of umem's memory."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.dim() == 2]
    return [not core.owns(optimizer.state[p]["exp_avg"].data_ptr()) for p in parameters]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture(scope="module")
def plain() -> list[torch.Tensor]:
    return run(*made())


def check(weights: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))


def test_every_optimizer_updates_on_the_host(plain: list[torch.Tensor]) -> None:
    with umem.enable(budget="48MiB", device="soft", policy="lru", optimizer="host"):
        net, optimizer = made()
        check(run(net, optimizer), plain)
        assert all(on_host(optimizer))
    check(run(*made()), plain)  # and no more once umem is off


def test_a_share_of_each_does(plain: list[torch.Tensor]) -> None:
    with umem.enable(budget="48MiB", device="soft", policy="lru", optimizer="50%"):
        net, optimizer = made()
        check(run(net, optimizer), plain)
        assert on_host(optimizer) == [False] * 3 + [True] * 3


@pytest.mark.parametrize("way", ["option", "call", "released"])
def test_auto_chooses_from_a_recorded_step(way: str, plain: list[torch.Tensor]) -> None:
    how = "auto" if way == "option" else "device"
    with umem.enable(budget="32MiB", device="soft", policy="auto", optimizer=how):
        net, optimizer = made()
        paged = None
        if way != "option":
            released = way == "released"
            paged = umem.page_optimizer(optimizer, update="auto", release_gradients=released)
            assert "not chosen yet" in repr(paged)
        check(run(net, optimizer), plain)
        if way != "released":  # else so little has to move that either is as fast
            assert any(on_host(optimizer))
        if paged is not None:
            assert "not chosen yet" not in repr(paged)
            assert ("updated on the host" in repr(paged)) == any(on_host(optimizer))
            paged.remove()
            assert not any(on_host(optimizer))
        del paged


def test_auto_leaves_the_device_to_it_where_all_fits(plain: list[torch.Tensor]) -> None:
    with umem.enable(budget="1GiB", device="soft", policy="auto", optimizer="auto"):
        net, optimizer = made()
        check(run(net, optimizer), plain)
        assert not any(on_host(optimizer))


def test_auto_without_plans_stays_on_the_device(plain: list[torch.Tensor]) -> None:
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        net, optimizer = made()
        paged = umem.page_optimizer(optimizer, update="auto")
        check(run(net, optimizer), plain)
        assert not any(on_host(optimizer))
        paged.remove()


@pytest.mark.parametrize("how", ["host", "auto"])
def test_what_the_host_cannot_update_stays(how: str, caplog: pytest.LogCaptureFixture) -> None:
    def loss_of(net: torch.nn.Module) -> torch.Tensor:
        net.zero_grad()
        value: torch.Tensor = net(torch.ones(4, SIDE)).square().mean()
        value.backward()
        return value

    with umem.enable(budget="256MiB", device="soft", policy="lru", optimizer=how):
        net, adam = made()
        lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=1)
        loss = partial(loss_of, net)
        with caplog.at_level(logging.WARNING, "umem"):
            lbfgs.step(loss)
            lbfgs.step(loss)
            adam.step(loss)
            adam.step(loss)  # later calls may have a closure, too
        said = [record.getMessage() for record in caplog.records]
        assert [text for text in said if "has a closure" in text] == [
            "LBFGS is updated on the device: step() has a closure",
            "AdamW is updated on the device: step() has a closure",
        ]
        del net, adam, lbfgs, loss


def test_the_programs_own_call_goes_first(plain: list[torch.Tensor]) -> None:
    with umem.enable(budget="48MiB", device="soft", policy="lru", optimizer="host"):
        net, optimizer = made()
        paged = umem.page_optimizer(optimizer)
        check(run(net, optimizer), plain)
        assert not any(on_host(optimizer))
        paged.remove()


def test_an_optimizer_dies_with_the_program_s_last_name() -> None:
    import weakref

    with umem.enable(budget="48MiB", device="soft", policy="lru", optimizer="host"):
        net, optimizer = made()
        run(net, optimizer, 2)
        gone = weakref.ref(optimizer)
        del net, optimizer
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("text", ["150%", "gpu", "0.5", "-1%"])
def test_a_bad_value_says_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match=r"optimizer=.*device, host, auto, or a percentage"):
        umem.enable(device="soft", optimizer=text)


@pytest.mark.parametrize("way", ["auto", "device"])
def test_a_share_needs_the_host(way: str) -> None:
    with umem.enable(budget="48MiB", device="soft", policy="lru"):
        net, optimizer = made()
        with pytest.raises(ConfigError, match=r"share=0.5.*with update='host'"):
            umem.page_optimizer(optimizer, update=way, share=0.5)
        del net, optimizer


def test_more_is_updated_on_a_faster_host() -> None:
    """The choice by the recorded step of a program, for hosts and links of other speeds."""
    with umem.enable(budget="32MiB", device="soft", policy="auto"):
        net, optimizer = made()
        run(net, optimizer, 6)
        recorded = session.planned_step()
        assert recorded is not None
        device = device_profiles.find("a100-pcie4")
        planned = recorded._replace(device=device)
        slow, fast = (host_share.choose(planned, rate, released=False) for rate in (1.0, 1e6))
        addresses = {p.data_ptr() for p in net.parameters() if p.dim() == 2}
        assert slow == frozenset()
        assert fast
        assert fast <= addresses
        roomy = planned._replace(budget=1 << 34)
        assert host_share.choose(roomy, 1.0, released=True) == frozenset()
        del net, optimizer


def test_the_rate_of_this_host_is_measured() -> None:
    with umem.enable(budget="48MiB", device="soft", policy="lru"):
        assert 10.0 < host_share.measured_rate() < 1e7  # 10 MB/s to 10 TB/s
