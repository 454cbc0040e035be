"""Optimizer state that is paged around the step, on the software device."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._pytree import tree_map_only  # noqa: E402

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.base.step_hooks import before_steps  # noqa: E402
from umem.errors import ConfigError, NotSupportedError, StateError  # noqa: E402
from umem.offload.optimizer import turns  # noqa: E402

MIB = 1 << 20
LAYERS, SIDE, WEIGHT = 6, 1024, 2 * MIB
PARAMS = LAYERS * WEIGHT
Make = Callable[[Any], torch.optim.Optimizer]


def adam(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3, **options)


def made_net() -> torch.nn.Module:
    torch.manual_seed(0)
    sides = [SIDE, SIDE // 2] * LAYERS
    return torch.nn.Sequential(*(torch.nn.Linear(*sides[i : i + 2]) for i in range(LAYERS)))


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The large ones."""
    found = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return [t for t in found if t.nbytes >= MIB]


def resident(tensors: list[torch.Tensor]) -> int:
    rows = umem.tensors(tensors)
    assert all(row.held for row in rows)
    return sum(row.resident_bytes for row in rows)


def copied(state: Any) -> Any:
    """A state_dict with umem's tensors, unlike a deep copy on a CPU."""
    return tree_map_only(torch.Tensor, torch.clone, state)


def train(
    make: Make, page: bool, steps: int = 4, after: Any = None, **options: Any
) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """The weights, and what each step moved in and out."""
    net = made_net()
    optimizer = make(net.parameters())
    paged = umem.page_optimizer(optimizer, **options) if page else None
    x, moved = torch.randn(64, SIDE), []
    for _ in range(steps):
        before = umem.stats()
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        now = umem.stats()
        moved.append((now.bytes_in - before.bytes_in, now.bytes_out - before.bytes_out))
        if after:
            after(optimizer)
    if paged:
        paged.remove()
    return [p.detach().clone() for p in net.parameters()], moved


@pytest.fixture
def backward_raises() -> Iterator[None]:
    """torch's queue keeps the rest of a backward pass that raised until the next one."""
    yield
    torch.ones(1, requires_grad=True).sum().backward()


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


MAKERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adam": adam,
    "adam-foreach": lambda p: adam(p, foreach=True),
    "adam-fused": lambda p: adam(p, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


@functools.cache
def plain(name: str) -> list[torch.Tensor]:
    """The weights without umem."""
    return train(MAKERS[name], page=False)[0]


@pytest.fixture(autouse=True, scope="module")
def _plain_first() -> Iterator[None]:
    for name in MAKERS:
        plain(name)
    yield
    plain.cache_clear()


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *itertools.product(MAKERS, ["lru"]),
        ("adam", "auto"),
        ("adam", "none"),
        *(
            pytest.param(name, "auto", marks=pytest.mark.nightly)
            for name in MAKERS
            if name != "adam"
        ),
    ],
)
def test_below_what_a_step_needs_the_bits_are_the_same(
    name: str, policy: str, release: bool
) -> None:
    with umem.enable(budget="24MiB", device="soft", policy=policy):
        paged, _ = train(MAKERS[name], page=True, release_gradients=release)
        assert same(plain(name), paged)
        del paged


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("release", [False, True])
def test_states_cross_once_each_way_and_are_out_after_the_step(
    options: dict[str, bool], release: bool
) -> None:
    left: list[int] = []

    def out(optimizer: torch.optim.Optimizer) -> None:
        assert len(states(optimizer)) == 2 * LAYERS
        left.append(resident(states(optimizer)))

    # Parameters, gradients, and two parts of the state; not all of it.
    with umem.enable(budget="42MiB", device="soft", policy="lru"):
        _, moved = train(
            lambda p: adam(p, **options), page=True, after=out, release_gradients=release
        )
        _, without = train(lambda p: adam(p, **options), page=False)
    assert left == [0] * 4
    assert moved[1:] == [(2 * PARAMS, 2 * PARAMS)] * 3
    assert all(came > MIB for came, _ in without[1:])


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_a_step_holds_little_state_at_once(how: str) -> None:
    def peak(page: bool) -> int:
        net = made_net()
        optimizer = adam(net.parameters(), **{how: True})
        with umem.page_optimizer(optimizer) if page else contextlib.nullcontext():
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            umem.reset_peak_stats()
            optimizer.step()
        return umem.stats().peak_resident_bytes

    with umem.enable(budget="72MiB", device="soft", policy="lru"):
        plain = peak(page=False)
        gc.collect()
        paged = peak(page=True)
    assert plain - paged >= 4 * WEIGHT  # of 12, with at most two parts of 4 on the device


def test_gradients_are_freed_as_soon_as_they_are_used() -> None:
    alive: list[int] = []
    with umem.enable(budget="256MiB", device="soft", policy="lru"):
        net = made_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

        def look(_: torch.Tensor) -> None:
            alive.append(sum(p.grad.nbytes for p in net.parameters() if p.grad is not None))

        hooks = [p.register_post_accumulate_grad_hook(look) for p in net.parameters()]
        x = torch.randn(64, SIDE)

        def peak() -> int:
            gc.collect()
            umem.reset_peak_stats()
            net(x).square().mean().backward()
            return umem.stats().peak_live_bytes - umem.stats().live_bytes + grads()

        def grads() -> int:
            return sum(p.grad.nbytes for p in net.parameters() if p.grad is not None)

        plain = peak()
        assert max(alive) == sum(p.nbytes for p in net.parameters())
        optimizer.zero_grad()
        alive.clear()
        with umem.page_optimizer(optimizer, release_gradients=True):
            released = peak()
            assert grads() == 0
            optimizer.step()
        assert max(alive) <= WEIGHT  # the largest one alone
        assert plain - released >= (LAYERS - 2) * WEIGHT
        for hook in hooks:
            hook.remove()


SMALL: dict[str, Make] = {
    f"{name}-{how}": (lambda p, make=make, foreach=foreach: make(p, foreach=foreach))
    for name, make in {
        "sgd": lambda p, **o: torch.optim.SGD(p, lr=0.1, **o),
        "momentum": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2, **o),
        "adam": lambda p, **o: torch.optim.Adam(p, lr=0.1, **o),
        "amsgrad": lambda p, **o: torch.optim.Adam(p, lr=0.1, amsgrad=True, **o),
        "rprop": lambda p, **o: torch.optim.Rprop(p, **o),
        "adamw": lambda p, **o: torch.optim.AdamW(p, lr=0.1, **o),
        "nadam": lambda p, **o: torch.optim.NAdam(p, lr=0.1, **o),
        "radam": lambda p, **o: torch.optim.RAdam(p, lr=0.1, **o),
        "adamax": lambda p, **o: torch.optim.Adamax(p, lr=0.1, **o),
        "rmsprop": lambda p, **o: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, **o),
        "adagrad": lambda p, **o: torch.optim.Adagrad(p, lr=0.1, **o),
        "adadelta": lambda p, **o: torch.optim.Adadelta(p, **o),
        "asgd": lambda p, **o: torch.optim.ASGD(p, lr=0.1, **o),
    }.items()
    for how, foreach in (("loop", False), ("foreach", True))
}


class Tied(torch.nn.Module):
    """With a weight that is used twice, and one that some steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(8, 8) for _ in range(3))
        self.seldom = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.c(self.a(x * self.seldom if seldom else x))


def schedule(make: Make, page: bool, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Groups with other options, a scheduler, a group added later, a loaded state."""
    torch.manual_seed(0)
    net, late = Tied(), torch.nn.Linear(8, 8)
    groups = [{"params": [*net.a.parameters(), net.seldom]},
              {"params": [*net.b.parameters(), *net.c.parameters()], "lr": 0.01}]  # fmt: skip
    optimizer = make(groups)
    paged = umem.page_optimizer(optimizer, **options) if page else None
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    x = torch.randn(4, 8)
    for i in range(8):
        optimizer.zero_grad()
        out = net(x, seldom=i % 3 == 0)
        (late(out) if i > 2 else out).square().mean().backward()
        assert optimizer.step(lambda: 5.0) == 5.0
        scheduler.step()
        if i == 3:
            optimizer.add_param_group({"params": late.parameters(), "lr": 0.03})
        if i == 5:
            optimizer.load_state_dict(copied(optimizer.state_dict()))
    state = optimizer.state_dict()
    if paged:
        paged.remove()
    return [p.detach() for p in (*net.parameters(), *late.parameters())], state


@pytest.mark.parametrize("release", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_groups_schedulers_and_loaded_states(release: bool) -> None:
    plain = {name: schedule(make, page=False) for name, make in SMALL.items()}
    with umem.enable(budget="32MiB", device="soft"):
        for name, (weights, state) in plain.items():
            paged, other = schedule(SMALL[name], page=True, release_gradients=release)
            assert same(weights, paged), name
            assert state["param_groups"] == other["param_groups"], name
            assert state["state"].keys() == other["state"].keys(), name
            for key, values in state["state"].items():
                mine = other["state"][key]
                assert values.keys() == mine.keys(), name
                tensors = [k for k, v in values.items() if torch.is_tensor(v)]
                assert same(*([s[k] for k in tensors] for s in (values, mine))), name


def test_a_state_that_is_loaded_or_there_already_leaves() -> None:
    with umem.enable(budget="256MiB", device="soft", policy="lru"):
        net = made_net()
        optimizer = adam(net.parameters())
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert resident(states(optimizer)) == 2 * PARAMS
        with umem.page_optimizer(optimizer):
            assert resident(states(optimizer)) == 0
            optimizer.load_state_dict(copied(optimizer.state_dict()))
            assert resident(states(optimizer)) == 0
        optimizer.step()
        assert resident(states(optimizer)) == 2 * PARAMS  # no longer paged
        del net, optimizer, p


def test_what_is_pinned_or_excluded_stays() -> None:
    with umem.enable(budget="256MiB", device="soft", policy="lru"):
        net = made_net()
        optimizer = adam(net.parameters())
        umem.page_optimizer(optimizer)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        one, two, *_ = states(optimizer)
        with umem.pin(one), umem.exclude(two):
            optimizer.step()
            assert [umem.where(t).resident_bytes for t in (one, two)] == [WEIGHT] * 2
            assert resident(states(optimizer)) == 2 * WEIGHT
        optimizer.step()
        assert resident(states(optimizer)) == 0
        del net, optimizer, p, one, two, _


def test_memory_that_cannot_move_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise NotSupportedError("memory is not managed here")

    with umem.enable(budget="256MiB", device="soft", policy="lru"):
        monkeypatch.setattr(core, "evict", refuse)
        paged, _ = train(adam, page=True)
        assert same(plain("adam"), paged)
        del paged
    assert caplog.text.count("remains on the device: memory is not managed") == 1


def test_a_host_without_room_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with umem.enable(budget="256MiB", host_budget="10MiB", device="soft", policy="lru"):
        paged, _ = train(adam, page=True)
        assert same(plain("adam"), paged)
        del paged
    told = [r.message for r in caplog.records if "remains on the device" in r.message]
    assert len(told) == 1


def test_parameters_in_the_same_memory_are_updated_together() -> None:
    """Each pass of the update takes all of them, so parts would mix the passes."""

    def run(page: bool) -> torch.Tensor:
        torch.manual_seed(0)
        one, other = (torch.nn.Parameter(torch.randn(SIDE, SIDE)) for _ in range(2))
        other.data = one.data
        optimizer = torch.optim.AdamW([one, other], foreach=True, weight_decay=0.1)
        paged = umem.page_optimizer(optimizer) if page else None
        for _ in range(3):
            ((one + 1).square() + other.square()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if paged:
            paged.remove()
        return one.detach().clone()

    with umem.enable(budget="32MiB", device="soft", policy="lru"):
        assert torch.equal(run(page=False), run(page=True))


class Clipping(torch.optim.SGD):
    """Its update of one parameter depends on all gradients."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        return super().step(closure)


class Wrapper:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


@pytest.mark.parametrize("policy", ["lru", "auto"])
def test_a_class_of_ones_own_and_a_wrapper(policy: str) -> None:
    def made(params: Any) -> Any:
        return Wrapper(Clipping(params, lr=0.1, momentum=0.9))

    def out(optimizer: Any) -> None:
        if policy == "lru":
            assert resident(states(optimizer)) == 0

    plain, _ = train(made, page=False)
    with umem.enable(budget="24MiB", device="soft", policy=policy):
        paged, _ = train(made, page=True, after=out)
        assert same(plain, paged)
        del paged


@pytest.mark.parametrize("policy", ["lru", "auto"])
def test_lbfgs_with_its_closure(policy: str) -> None:
    def run(page: bool) -> list[torch.Tensor]:
        net = made_net()
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2, history_size=2)
        paged = umem.page_optimizer(optimizer) if page else None
        x = torch.randn(16, SIDE)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
            if paged and policy == "lru":
                (state,) = optimizer.state.values()
                assert resident([*state["old_dirs"], state["prev_flat_grad"]]) == 0
        return [p.detach().clone() for p in net.parameters()]

    plain = run(page=False)
    with umem.enable(budget="64MiB", device="soft", policy=policy):
        paged = run(page=True)
        assert same(plain, paged)
        del paged


@pytest.mark.parametrize("release", [False, True])
def test_a_closure_runs_its_passes_and_its_loss_returns(release: bool) -> None:
    def run(page: bool) -> tuple[list[torch.Tensor], list[float]]:
        torch.manual_seed(0)
        net = Tied()
        optimizer = adam(net.parameters())
        if page:
            umem.page_optimizer(optimizer, release_gradients=release)
        x = torch.randn(4, 8)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x, True).square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(4)]
        return [p.detach() for p in net.parameters()], losses

    plain = run(page=False)
    with umem.enable(budget="32MiB", device="soft"):
        paged = run(page=True)
        assert same(plain[0], paged[0])
        assert plain[1] == paged[1]
        del paged


def accumulated(page: bool, inside: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = Tied()
    optimizer = adam(net.parameters())
    paged = umem.page_optimizer(optimizer, release_gradients=True) if page else None
    for i in range(3):
        for j in range(3):
            x = torch.full((4, 8), i + j / 3)
            if paged and j < inside:
                with paged.accumulate():
                    net(x, True).square().mean().backward()
            else:
                net(x, True).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


@pytest.mark.usefixtures("backward_raises")
def test_accumulated_gradients_are_told_or_refused() -> None:
    plain = accumulated(page=False, inside=0)
    with umem.enable(budget="32MiB", device="soft"):
        for inside in (2, 3):
            assert same(plain, accumulated(page=True, inside=inside))
        with pytest.raises(StateError, match=r"second gradient.*paged\.accumulate"):
            accumulated(page=True, inside=0)


def test_a_loss_that_is_scaled_stops_at_the_scaler() -> None:
    with umem.enable(budget="32MiB", device="soft"):
        net = torch.nn.Linear(8, 8)
        optimizer = adam(net.parameters())
        umem.page_optimizer(optimizer, release_gradients=True)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(net(torch.ones(2, 8)).sum()).backward()
        assert net.weight.grad is None
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(optimizer)


@pytest.mark.usefixtures("backward_raises")
def test_a_gradient_that_is_differentiated_or_gone_is_refused() -> None:
    with umem.enable(budget="32MiB", device="soft"):
        net = torch.nn.Linear(8, 8)
        one, two = adam(net.parameters()), adam(net.parameters())
        with umem.page_optimizer(one, release_gradients=True):
            with pytest.raises(StateError, match="create_graph"):
                net(torch.ones(2, 8)).square().sum().backward(create_graph=True)
            net.zero_grad()
            umem.page_optimizer(two, release_gradients=True)
            with pytest.raises(StateError, match="another hook took"):
                net(torch.ones(2, 8)).sum().backward()
        del two
        net.zero_grad()
        gc.collect()
        net(torch.ones(2, 8)).sum().backward()
        assert net.weight.grad is not None  # as both were freed


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_finds_its_gradients(fused: bool) -> None:
    def run(page: bool) -> list[torch.Tensor]:
        net = made_net()
        optimizer = adam(net.parameters(), fused=fused)
        if page:
            umem.page_optimizer(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        x = torch.randn(16, SIDE)
        for i in range(4):
            optimizer.zero_grad()
            loss = net(x).square().mean() * (float("inf") if i == 2 else 1.0)  # that one is skipped
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().clone() for p in net.parameters()]

    plain = run(page=False)
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        paged = run(page=True)
        assert same(plain, paged)
        del paged


@pytest.mark.usefixtures("backward_raises")
def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net = torch.nn.Linear(8, 8)
    optimizer = adam(net.parameters())
    wrong: list[Any] = [None, 3, net, [optimizer], torch.optim.Adam]
    with pytest.raises(StateError, match=r"umem\.enable\(\)"):
        umem.page_optimizer(optimizer)
    with umem.enable(budget="32MiB", device="soft"):
        for target in wrong:
            with pytest.raises(ConfigError, match=r"allowed: a\s+torch\.optim\.Optimizer"):
                umem.page_optimizer(target)
        with umem.page_optimizer(optimizer):
            with pytest.raises(ConfigError, match="paged already"):
                umem.page_optimizer(optimizer)
            with pytest.raises(ConfigError, match="paged already"):
                umem.page_optimizer(Wrapper(optimizer))  # type: ignore[arg-type]
        umem.page_optimizer(optimizer).remove()
        for wrong in (
            torch.optim.LBFGS(net.parameters()), Clipping(net.parameters(), lr=1.0),
            adam(net.parameters(), differentiable=True),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match="release_gradients=True"):
                umem.page_optimizer(wrong, release_gradients=True)
            umem.page_optimizer(wrong).remove()
        paged = umem.page_optimizer(optimizer, release_gradients=True)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        before = net.weight.tolist()
        with pytest.raises(StateError, match="averaged over 2 processes"):  # since then
            net(torch.ones(8)).sum().backward()
        assert net.weight.tolist() == before
        paged.remove()
        with pytest.raises(ConfigError, match="averaged over 2 processes"):
            umem.page_optimizer(optimizer, release_gradients=True)


def test_off_and_on_again_and_tensors_from_before() -> None:
    net = made_net()
    optimizer = adam(net.parameters())
    x = torch.randn(64, SIDE)
    plain = copy.deepcopy(net)
    other = adam(plain.parameters())

    def step() -> bool:
        for model, opt in ((net, optimizer), (plain, other)):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
        return same(list(net.parameters()), list(plain.parameters()))

    umem.enable(budget="64MiB", device="soft", policy="lru")
    paged = umem.page_optimizer(optimizer)  # its parameters are not umem's
    assert step()
    umem.disable()
    assert step()
    umem.enable(budget="64MiB", device="soft", policy="lru")
    assert step()
    assert resident(states(optimizer)) == 0
    paged.remove()
    paged.remove()
    assert "removed" in repr(paged)
    assert step()
    umem.page_optimizer(optimizer, release_gradients=True)
    assert step()
    assert net[0].weight.grad is None
    umem.disable()
    assert step()
    assert net[0].weight.grad is None  # also while umem is off
    del paged


def test_nothing_keeps_the_optimizer_alive() -> None:
    with umem.enable(budget="32MiB", device="soft"):
        net = torch.nn.Linear(8, 8)
        optimizer = adam(net.parameters())
        umem.page_optimizer(optimizer, release_gradients=True)
        seen = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert seen() is None
        net(torch.ones(2, 8)).sum().backward()
        assert net.weight.grad is not None  # no optimizer takes it


@pytest.mark.parametrize("foreach", [False, True])
def test_a_plan_moves_the_states_itself(foreach: bool) -> None:
    acted: list[tuple[int, int]] = []

    def look(optimizer: torch.optim.Optimizer) -> None:
        acted.append((core.plan_status()["active"], resident(states(optimizer))))

    with umem.enable(budget="40MiB", device="soft", policy="auto"):
        _, moved = train(lambda p: adam(p, foreach=foreach), page=True, steps=6, after=look)
        status = core.plan_status()
    assert acted[0] == (0, 0)
    assert all(plan and left for plan, left in acted[2:])  # no hook sends out what a plan keeps
    assert status["complete"]
    assert status["misses"] == 0  # with hooks or without, a step has the same operators
    assert max(came for came, _ in moved[3:]) <= 2 * PARAMS


def test_an_optimizer_that_is_gone_is_named() -> None:
    with umem.enable(budget="32MiB", device="soft"):
        net = torch.nn.Linear(8, 8)
        optimizer = adam(net.parameters())
        paged = umem.page_optimizer(optimizer, release_gradients=True)
        del optimizer
        gc.collect()
        with pytest.raises(StateError, match=r"the optimizer .* is gone.* call remove"):
            net(torch.ones(1, 8)).sum().backward()
        paged.remove()
        net(torch.ones(1, 8)).sum().backward()
        assert all(parameter.grad is not None for parameter in net.parameters())
        del net, paged


def test_an_operation_waits_a_while_for_that_of_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = adam([torch.nn.Parameter(torch.zeros(2))])
    turn = turns.Turn(optimizer)
    begun, over = threading.Event(), threading.Event()

    def operate() -> None:
        with turn.take("step()"):
            begun.set()
            over.wait()

    other = threading.Thread(target=operate)
    other.start()
    begun.wait()
    monkeypatch.setattr(turns, "_PATIENCE_S", 0.01)
    words = r"remove\(\) has waited .* on another thread; nothing was changed"
    with pytest.raises(StateError, match=words), turn.take("remove()"):
        pytest.fail("it is the other thread's turn")
    over.set()
    other.join()
    with turn.take("remove()"):
        words = r"step\(\) was called in the middle of an operation of the same Adam"
        with pytest.raises(StateError, match=words):
            turn.check("step()")


def test_a_checkpoint_waits_a_while_for_the_step_of_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = adam([weight])
    turn = turns.Turn(optimizer)
    turn.acts = True
    begun, over = threading.Event(), threading.Event()

    def closure() -> float:
        begun.set()
        over.wait()
        return 0.0

    other = threading.Thread(target=optimizer.step, args=(closure,))
    other.start()
    begun.wait()
    with monkeypatch.context() as patch:
        patch.setattr(turns, "_PATIENCE_S", 0.01)
        with pytest.raises(StateError, match=r"state_dict\(\) has waited .* on another thread"):
            turn.await_steps("state_dict()")
    over.set()
    turn.await_steps("state_dict()")  # until that step is over
    other.join()

    def refused() -> float:
        with pytest.raises(StateError, match=r"remove\(\) was called in the middle"):
            turn.await_steps("remove()")
        turn.await_steps("remove()", own=1)
        return 0.0

    optimizer.step(refused)


def test_a_checkpoint_within_a_checkpoint_is_refused() -> None:
    with umem.enable(budget="64MiB", device="soft"):
        net = torch.nn.Linear(8, 8)
        optimizer = adam(net.parameters())
        paged = umem.page_optimizer(optimizer, update="host")
        within = optimizer.register_state_dict_pre_hook(lambda mine: mine.state_dict())
        with pytest.raises(StateError, match=r"state_dict\(\) was called in the middle"):
            optimizer.state_dict()
        within.remove()
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 1e-3
        paged.remove()


def test_no_hook_remains_once_nothing_is_paged() -> None:
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        for how in ("removed", "gone"):
            net = torch.nn.Linear(8, 8)
            optimizer = adam(net.parameters())
            paged = umem.page_optimizer(optimizer)
            net(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            if how == "removed":
                paged.remove()
            del net, optimizer, paged
            gc.collect()
    assert not before_steps._hooks


def test_a_method_that_is_watched_returns_what_it_did() -> None:
    class Own(torch.optim.SGD):
        def load_state_dict(self, saved: Any) -> Any:
            super().load_state_dict(saved)
            return "loaded"

    with umem.enable(budget="64MiB", device="soft"):
        net = torch.nn.Linear(8, 8)
        optimizer = Own(net.parameters())
        with umem.page_optimizer(optimizer):
            assert optimizer.load_state_dict(optimizer.state_dict()) == "loaded"
        del net, optimizer


def test_a_zero_grad_of_the_programs_own_is_put_back() -> None:
    with umem.enable(budget="64MiB", device="soft"):
        net = torch.nn.Linear(8, 8)
        optimizer = adam(net.parameters())
        asked = []
        own = lambda set_to_none=True: asked.append(set_to_none)  # noqa: E731
        optimizer.zero_grad = own  # type: ignore[method-assign]
        paged = umem.page_optimizer(optimizer, update="host")
        optimizer.zero_grad(set_to_none=False)
        assert asked == [False]
        paged.remove()
        assert optimizer.zero_grad is own


@pytest.mark.parametrize("update", ["device", "host"])
def test_hooks_of_a_later_time_come_before_the_update(update: str) -> None:
    """They change gradients, and what is loaded."""

    def trained(page: bool) -> list[torch.Tensor]:
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        torch.nn.init.ones_(net[0].weight)
        torch.nn.init.zeros_(net[1].weight)
        optimizer = adam(net.parameters())
        if page:
            paged = umem.page_optimizer(optimizer, update=update)

        def halve(*_: object) -> None:
            for parameter in net.parameters():
                parameter.grad.mul_(torch.arange(8.0))

        def swapped(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
            first, second = saved["state"][0], saved["state"][2]
            return {**saved, "state": {**saved["state"], 0: second, 2: first}}

        optimizer.register_step_pre_hook(halve)
        optimizer.register_load_state_dict_pre_hook(swapped)
        for step in range(4):
            optimizer.zero_grad()
            net(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(copied(optimizer.state_dict()))
        if page:
            paged.remove()
        assert not {"zero_grad", "load_state_dict", "__getstate__"} & set(vars(optimizer))
        return [p.detach().clone() for p in net.parameters()]

    torch.manual_seed(0)
    plain = trained(page=False)
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        torch.manual_seed(0)
        got = trained(page=True)
        assert all(map(torch.equal, plain, got))
        del got


@pytest.mark.parametrize("update", ["device", "host"])
def test_hooks_of_a_later_time_read_gradients_before_they_are_released(update: str) -> None:
    """Each step, also the first one that has the hook, and beside hooks that end."""

    def trained(page: bool) -> tuple[list[torch.Tensor], list[float], int]:
        net = made_net()
        optimizer = adam(net.parameters(), fused=True)  # as the host updates
        read: list[float] = []
        if page:
            umem.page_optimizer(optimizer, release_gradients=True, update=update)
        left = 0
        for step in range(4):
            if step == 1:
                for p in net.parameters():
                    p.register_post_accumulate_grad_hook(lambda q: read.append(float(q.grad.sum())))
            optimizer.zero_grad()
            net(torch.ones(2, SIDE)).square().mean().backward()
            left = sum(p.grad is not None for p in net.parameters())
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()], read, left

    plain, read, _ = trained(page=False)
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        got, also_read, left = trained(page=True)
        assert also_read == read
        assert len(read) == 3 * 2 * LAYERS
        assert left == 0  # released again
        assert all(map(torch.equal, plain, got))
        del got
        gc.collect()


@pytest.mark.parametrize("update", ["device", "host"])
def test_a_step_that_dynamo_has_wrapped_is_a_step(
    update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `torch.compile` does with the classes that it does not compile."""
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        table = torch.nn.Embedding(64, 8, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters())
        paged = umem.page_optimizer(optimizer, update=update)
        hooked = torch.optim.SparseAdam.step

        @functools.wraps(hooked)
        def disabled(*args: Any, **named: Any) -> Any:
            return hooked(*args, **named)

        inside = []

        def note(optimizer: Any, *_: object) -> None:
            with pytest.raises(StateError, match="in the middle of an operation"):
                optimizer.state_dict()
            inside.append(len(inside))

        for step in range(3):
            table(torch.tensor([1, 5])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                monkeypatch.setattr(torch.optim.SparseAdam, "step", disabled)
        assert int(optimizer.state[table.weight]["step"]) == 3
        table(torch.tensor([1, 5])).sum().backward()
        optimizer.register_step_post_hook(note)
        optimizer.step()
        assert inside == [0]
        paged.remove()
        del table, optimizer, paged
        gc.collect()


def test_gradients_of_a_lazy_module_are_released_once_it_is_there() -> None:
    def trained(page: bool) -> list[torch.Tensor]:
        net = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.Linear(8, 8))
        optimizer = adam(net.parameters())
        if page:
            umem.page_optimizer(optimizer, release_gradients=True)
        torch.manual_seed(0)
        net(torch.ones(2, 4))
        for module in net:
            module.reset_parameters()
        for number in range(3):
            net(torch.ones(2, 4)).square().mean().backward()
            if page and number:
                assert all(p.grad is None for p in net.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in net.parameters()]

    plain = trained(page=False)
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        got = trained(page=True)
        assert all(map(torch.equal, plain, got))
        del got
        gc.collect()


def test_a_layer_that_is_frozen_later_keeps_its_weights_and_gets_no_gradient() -> None:
    def trained(release: bool) -> list[torch.Tensor]:
        net = made_net()
        optimizer = adam(net.parameters())
        if release:
            umem.page_optimizer(optimizer, release_gradients=True)
        first = net[0]
        for number in range(4):
            if number == 2:
                first.requires_grad_(False)
                optimizer.zero_grad()
                before = first.weight.detach().clone()
            net(torch.ones(8, SIDE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert first.weight.grad is None
        assert torch.equal(first.weight, before)
        return [p.detach().clone() for p in net.parameters()]

    with umem.enable(budget="64MiB", device="soft"):
        assert same(trained(release=False), trained(release=True))
