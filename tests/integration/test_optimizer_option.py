"""The option `optimizer`, and `page_optimizer(update="auto")`: the updater, and the bits."""

from __future__ import annotations

import functools
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support import forkserver  # noqa: E402

import umem  # noqa: E402
from umem.base import device_profiles  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.config import settings  # noqa: E402
from umem.errors import ConfigError  # noqa: E402
from umem.offload.optimizer import host_update  # noqa: E402
from umem.session import host_share, session  # noqa: E402
from umem.session.planned_step import PlannedStep  # noqa: E402

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
    """For each large state, whether it is outside of umem's memory."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.dim() == 2]
    return [not core.owns(optimizer.state[p]["exp_avg"].data_ptr()) for p in parameters]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    yield
    gc.collect()


@functools.cache
def _plain() -> list[torch.Tensor]:
    return run(*made())


@pytest.fixture  # not the module's, for which threads are not set yet
def plain() -> list[torch.Tensor]:
    return _plain()


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


@pytest.fixture
def host_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The more the host updates the better: else it depends on this machine's speed."""
    monkeypatch.setattr(host_share, "_estimate_us", lambda _, share, *a, **k: 2.0 - share)


@pytest.mark.usefixtures("host_is_best")
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
        assert all(on_host(optimizer))
        if paged is not None:
            assert "not chosen yet" not in repr(paged)
            assert "updated on the host" in repr(paged)
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
        loss = functools.partial(loss_of, net)
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
        gc.disable()  # nor does it wait for the collector
        try:
            del net, optimizer
            assert gone() is None
        finally:
            gc.enable()


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
        trace = recorded.trace
        trace = replace(trace, op_us=np.full(trace.n_ops, 1.0))  # else it is this machine's
        planned = replace(recorded, device=device, trace=trace)
        addresses = {p.data_ptr() for p in net.parameters() if p.dim() == 2}

        def choose(planned: PlannedStep, rate: float, mine: set[int]) -> frozenset[int] | None:
            return host_share.choose(planned, mine, lambda: rate, released=False)

        assert choose(planned, 1.0, addresses) == frozenset()
        fast = choose(planned, 1e6, addresses)
        assert fast
        assert fast <= addresses
        assert choose(replace(planned, budget=1 << 34), 1.0, addresses) == frozenset()
        assert choose(planned, 1e6, {1}) is None  # another optimizer's step
        del net, optimizer


def test_the_rate_of_this_host_is_measured() -> None:
    with umem.enable(budget="48MiB", device="soft", policy="lru"):
        assert 10.0 < host_share.measured_rate() < 1e7  # 10 MB/s to 10 TB/s


def test_the_rate_is_that_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(values: list[torch.Tensor], *_: Any, **__: Any) -> None:
        assert values[0].dtype == torch.float32

    monkeypatch.setattr(torch, "_fused_adam_", update)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with umem.enable(budget="48MiB", device="soft", policy="lru"):
            host_share.measured_rate.__wrapped__()
    finally:
        torch.set_default_dtype(torch.float32)


# --- found by attacks ------------------------------------------------------------------------


def test_parameters_in_the_same_memory_are_updated_one_after_another() -> None:
    def weights(how: str) -> torch.Tensor:
        with umem.enable(budget="64MiB", device="soft", policy="lru", optimizer=how):
            one, other = torch.nn.Linear(SIDE, SIDE), torch.nn.Linear(SIDE, SIDE)
            torch.nn.init.ones_(one.weight)
            other.weight.data = one.weight.data
            both = [one.weight, other.weight]
            optimizer = torch.optim.SGD(both, lr=1.0, fused=True)
            for parameter in both:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            return one.weight.detach().clone()

    assert torch.equal(weights("device"), weights("host"))
    gc.collect()


def test_a_closure_in_a_later_step_gives_the_updates_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        run(net, optimizer, 3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(torch.ones(4, SIDE)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        return run(net, optimizer, 3)

    expected = train(*made())
    with umem.enable(budget="64MiB", device="soft", policy="lru", optimizer="host"):
        with caplog.at_level(logging.WARNING, "umem"):
            net, optimizer = made()
            check(train(net, optimizer), expected)
        assert "step() has a closure" in caplog.text
        assert not any(on_host(optimizer))


@pytest.mark.parametrize("how", ["host", "auto"])
def test_parameters_that_the_host_cannot_update_stay(how: str) -> None:
    def train() -> torch.Tensor:
        torch.manual_seed(1)
        meta = torch.nn.Linear(SIDE, SIDE, device="meta")
        lazy = torch.nn.LazyLinear(8)
        net = torch.nn.Linear(SIDE, SIDE)
        optimizer = torch.optim.SGD([*meta.parameters(), *net.parameters()], lr=0.1)
        other = torch.optim.SGD([*lazy.parameters(), *net.parameters()], lr=0.1)
        for _ in range(4):
            meta(torch.ones(2, SIDE, device="meta")).sum().backward()
            net(torch.ones(2, SIDE)).sum().backward()
            optimizer.step()
            other.step()
        return net.weight.detach().clone()

    expected = train()
    with umem.enable(budget="64MiB", device="soft", policy="auto", optimizer=how):
        assert torch.equal(train(), expected)


@pytest.mark.parametrize("how", ["host", "auto", "50%"])
def test_a_parameter_of_two_optimizers_is_one_s(how: str) -> None:
    def train() -> list[torch.Tensor]:
        net, one = made()
        last = list(net.parameters())[-2:]
        other = torch.optim.SGD([torch.nn.Parameter(torch.ones(8))], lr=0.1, fused=True)
        run(net, one, 2)
        other.step()
        other.add_param_group({"params": last})
        for _ in range(6):
            run(net, one, 1)
            other.step()
        return [p.detach().clone() for p in net.parameters()]

    expected = train()
    with umem.enable(budget="48MiB", device="soft", policy="auto", optimizer=how):
        check(train(), expected)


@pytest.mark.usefixtures("host_is_best")
def test_auto_waits_for_a_step_of_its_own() -> None:
    with umem.enable(budget="32MiB", device="soft", policy="auto", optimizer="auto"):
        net, optimizer = made()
        run(net, optimizer)
        assert all(on_host(optimizer))
        del net, optimizer
        gc.collect()
        net, optimizer = made()  # another model, of the same kind
        run(net, optimizer)
        assert any(on_host(optimizer))  # a plan of the first one's steps contains some of them
        del net, optimizer


def test_many_optimizers_share_a_thread_and_buffers() -> None:
    with umem.enable(budget="64MiB", device="soft", policy="lru", optimizer="host"):
        parameters = [torch.nn.Parameter(torch.ones(64)) for _ in range(40)]
        optimizers = [torch.optim.SGD([p], lr=0.1, fused=True) for p in parameters]
        for _ in range(2):
            for parameter, optimizer in zip(parameters, optimizers, strict=True):
                parameter.grad = torch.ones_like(parameter)
                optimizer.step()
        names = [thread.name for thread in threading.enumerate()]
        assert sum("umem-host-update" in name for name in names) == 1
        assert len(host_update._stagings._spare) <= 3
        assert all(float(p.detach()[0]) == pytest.approx(0.8) for p in parameters)
    assert host_update._stagings._spare == []


def test_a_hook_of_a_later_time_still_comes_before_the_update() -> None:
    def train(how: str) -> list[torch.Tensor]:
        with umem.enable(budget="64MiB", device="soft", policy="lru", optimizer=how):
            net, optimizer = made()
            run(net, optimizer, 2)

            def halve(*_: object) -> None:
                for parameter in net.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)

            optimizer.register_step_pre_hook(halve)
            return [w.clone() for w in run(net, optimizer, 3)]

    check(train("host"), train("device"))
    gc.collect()


def test_parameters_can_still_be_swapped() -> None:
    with umem.enable(budget="64MiB", device="soft", policy="lru", optimizer="host"):
        net, optimizer = made()
        run(net, optimizer, 2)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            net.to(torch.float64)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert {p.dtype for p in net.parameters()} == {torch.float64}
        del net, optimizer


PROGRAM = """
import threading, torch, umem
umem.enable(budget="64MiB", device="soft", policy="lru", optimizer="host", summary=True)
net = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.AdamW(net.parameters(), fused=True)
def train():
    import time
    time.sleep(0.5)
    for _ in range(2):
        net(torch.ones(2, 1024)).sum().backward()
        optimizer.step()
    print("done", flush=True)
threading.Thread(target=train).start()
"""


def test_a_thread_may_train_after_the_main_one_has_ended() -> None:
    done = forkserver.run(["-c", PROGRAM])
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_end_of_a_program_brings_no_states_back() -> None:
    program = """
import torch, umem
from umem.offload.optimizer import host_update
host_update.HostUpdate.give_back = lambda *_: print("given back", flush=True)
umem.enable(budget="64MiB", device="soft", policy="lru", optimizer="host", summary=True)
net = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.AdamW(net.parameters(), fused=True)
for _ in range(2):
    net(torch.ones(2, 1024)).sum().backward()
    optimizer.step()
print("end", flush=True)
"""
    done = forkserver.run(["-c", program])
    assert done.stdout.splitlines() == ["end"], done.stderr
    assert "Exception" not in done.stderr
    assert "umem: 2 steps" in done.stderr


@pytest.mark.parametrize(("text", "shown"), [("auto", "auto"), ("100%", "host"), ("25%", "25%")])
def test_the_option_is_shown_as_it_is_written(text: str, shown: str) -> None:
    assert str(settings.load({"optimizer": text}).optimizer) == shown


def test_without_torch_s_allocator_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer=.*allocator=none"):
        umem.enable(allocator="none", optimizer="host")
