"""Optimizers that update on the host, on the software device: the bits of the fused kernel."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support import program  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.errors import ConfigError, StateError  # noqa: E402
from umem.offload.optimizer import host_update, parts  # noqa: E402

MIB = 1 << 20
SIDE = 512
Make = Callable[[Any], torch.optim.Optimizer]

FUSED: dict[str, Make] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
}
OTHERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, foreach=False),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-3, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, foreach=False),
}
MAKERS = {**FUSED, **OTHERS}


def plainly_fused(name: str) -> Make:
    """The same, by the kernel that updates on the host use."""
    made = MAKERS[name]
    return (lambda p: torch.optim.SGD(p, lr=1e-2, fused=True)) if name == "sgd" else made


class Net(torch.nn.Module):
    """Layers, an odd number of small parameters, one that is used twice, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(SIDE, SIDE) for _ in range(4))
        self.norm = torch.nn.LayerNorm(SIDE)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.ones(SIDE), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, self.layers[0]]:
            x = torch.relu(layer(x)) + self.frozen
        return self.norm(x).mul(self.scale.sum()).square().mean()


def train(
    make: Make, steps: int = 3, in_step: Callable[..., None] | None = None, **page: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The weights and the states."""
    net = Net()
    optimizer = make(net.parameters())
    paged = umem.page_optimizer(optimizer, **page) if page else None
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(32, SIDE)).backward()
        if in_step:
            in_step(net, optimizer)
        optimizer.step()
    if paged:
        paged.remove()
    known = [optimizer.state[p] for p in net.parameters() if p in optimizer.state]
    states = [s[name] for s in known for name in sorted(s) if torch.is_tensor(s[name])]
    return [copies(p) for p in net.parameters()], [copies(t) for t in states]


def copies(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def held(optimizer: torch.optim.Optimizer) -> list[bool]:
    """For each tensor of the state, whether it is in umem's memory."""
    found = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return [core.owns(t.data_ptr()) for t in found if t.numel()]


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("policy", ["lru", "auto"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_bits_are_those_of_the_fused_kernel(name: str, policy: str, release: bool) -> None:
    plain = train(plainly_fused(name), steps=4)
    with umem.enable(budget="12MiB", device="soft", policy=policy):
        weights, states = train(MAKERS[name], 4, update="host", release_gradients=release)
        assert same(plain[0], weights)
        assert same(plain[1], states)
        del weights, states


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_share_is_updated_there(share: float, release: bool) -> None:
    plain, _ = train(MAKERS["adam"])
    seen: list[float] = []

    def look(_: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        large = {p: s for p, s in optimizer.state.items() if p.dim() == 2}
        there = [not core.owns(s["exp_avg"].data_ptr()) for s in large.values()]
        if there:
            seen.append(sum(there) / len(there))

    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        weights, _ = train(
            MAKERS["adam"], in_step=look, update="host", share=share, release_gradients=release
        )
        assert same(plain, weights)
        del weights
    assert seen[-1] == {0.0: 0.0, 0.4: 0.5, 1.0: 1.0}[share]


def test_states_take_no_memory_of_umem_and_steps_move_no_states() -> None:
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        net = Net()
        optimizer = torch.optim.Adam(net.parameters())
        with umem.page_optimizer(optimizer, update="host") as paged:
            for _ in range(2):
                net(torch.randn(32, SIDE)).backward()
                optimizer.step()
            assert not any(held(optimizer))
            assert "100% updated on the host" in repr(paged)
        assert all(held(optimizer))  # as the optimizer itself would have them
        del net, optimizer, paged
        gc.collect()


def test_states_that_are_there_already_or_are_loaded_go_to_the_host_too() -> None:
    plain, _ = train(MAKERS["adamw"], steps=4)
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        net = Net()
        optimizer = MAKERS["adamw"](net.parameters())
        torch.manual_seed(1)
        for i in range(4):
            if i == 1:
                paged = umem.page_optimizer(optimizer, update="host")
                assert not any(held(optimizer))
            if i == 3:
                saved = io.BytesIO()
                torch.save(optimizer.state_dict(), saved)
                saved.seek(0)
                for state in optimizer.state.values():
                    state["exp_avg"].zero_()
                optimizer.load_state_dict(torch.load(saved))
                assert not any(held(optimizer))
            optimizer.zero_grad()
            net(torch.randn(32, SIDE)).backward()
            optimizer.step()
        state_dict = copy.deepcopy(optimizer.state_dict())
        paged.remove()
        assert same(plain, [copies(p) for p in net.parameters()])
        other = torch.optim.AdamW(Net().parameters(), lr=1e-3)  # a plain one takes it
        other.load_state_dict(tree_map_only(torch.Tensor, torch.clone, state_dict))
        del net, optimizer, other, state_dict, paged, state
        gc.collect()


def test_clipping_accumulation_groups_and_schedules() -> None:
    def run(**page: Any) -> list[torch.Tensor]:
        net = Net()
        layers = list(net.layers.parameters())
        optimizer = torch.optim.AdamW(layers, lr=1e-3, fused=True)
        paged = umem.page_optimizer(optimizer, **page) if page else None
        optimizer.add_param_group({"params": [net.scale], "lr": 1e-2})
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                net(torch.randn(32, SIDE)).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
        if paged:
            paged.remove()
        return [copies(p) for p in net.parameters()]

    plain = run()
    with umem.enable(budget="24MiB", device="soft", policy="auto"):
        weights = run(update="host")
        assert same(plain, weights)
        del weights


@pytest.mark.parametrize("overflow", [False, True])
def test_what_a_grad_scaler_leaves_for_fused_kernels_counts(overflow: bool) -> None:
    def scaled(_: torch.nn.Module, optimizer: Any) -> None:
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.found_inf = torch.tensor(float(overflow))

    plain, _ = train(MAKERS["adamw"], in_step=scaled)
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        weights, _ = train(MAKERS["adamw"], in_step=scaled, update="host")
        assert same(plain, weights)
        del weights


@pytest.mark.parametrize("overflow", [False, True])
def test_kernels_that_are_not_fused_have_what_a_grad_scaler_leaves(overflow: bool) -> None:
    """Torch's fused SGD skips values of half precision."""

    def run(*, host: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE).bfloat16(), torch.nn.Linear(SIDE, 4))
        how = {"fused": True} if host else {"foreach": False}
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, **how)
        paged = umem.page_optimizer(optimizer, update="host") if host else None
        for _ in range(3):
            net[1](net[0](torch.ones(8, SIDE).bfloat16()).float()).square().mean().backward()
            if host:
                optimizer.grad_scale = torch.tensor(4.0)
                optimizer.found_inf = torch.tensor(float(overflow))
            else:
                for p in net.parameters():
                    p.grad.div_(4.0)
            if host or not overflow:
                optimizer.step()
            optimizer.zero_grad()
        if paged is not None:
            paged.remove()
        return [copies(p) for p in net.parameters()]

    plain = run(host=False)
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        weights = run(host=True)
        assert torch.equal(weights[0], plain[0])
        assert all(torch.allclose(a, b) for a, b in zip(weights, plain, strict=True))
        del weights


def test_what_the_program_does_to_a_parameter_between_steps_counts() -> None:
    def change(net: Any, _: torch.optim.Optimizer) -> None:
        net.layers[1].weight.data.mul_(0.5)  # unseen by the version counter

    plain, _ = train(MAKERS["adamw"], in_step=change)
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        weights, _ = train(MAKERS["adamw"], in_step=change, update="host")
        assert same(plain, weights)
        del weights


@pytest.mark.parametrize("momentum", [0.0, 0.9])  # which is sparse, too
def test_sparse_gradients_stay_on_the_device(momentum: float) -> None:
    def run(**page: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        table = torch.nn.Embedding(1024, 64, sparse=True)
        layer = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(
            [*table.parameters(), *layer.parameters()], lr=0.1, momentum=momentum
        )
        paged = umem.page_optimizer(optimizer, **page) if page else None
        for i in range(3):
            optimizer.zero_grad()
            layer(table(torch.arange(i, 40 + i))).square().mean().backward()
            optimizer.step()
        if paged:
            paged.remove()
        return [copies(p) for p in (*table.parameters(), *layer.parameters())]

    plain = run()
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        assert same(plain, run(update="device"))
        weights = run(update="host")
        assert torch.equal(plain[0], weights[0])
        assert all(torch.allclose(a, b) for a, b in zip(plain, weights, strict=True))
        del weights


def test_plans_are_followed() -> None:
    """The order in which threads end must not affect a step's operators."""
    with umem.enable(budget="12MiB", device="soft", policy="auto"):
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters())
        paged = umem.page_optimizer(optimizer, update="host", release_gradients=True)
        x = torch.randn(512, SIDE)
        for i in range(16):
            if i == 8:
                before = umem.stats()
            optimizer.zero_grad()
            net(x).backward()
            optimizer.step()
        now = umem.stats()
        hits, misses = now.plan_hits - before.plan_hits, now.plan_misses - before.plan_misses
        assert hits > 100
        assert misses <= 0.01 * hits
        paged.remove()
        del net, optimizer, x, paged
        gc.collect()


@pytest.mark.parametrize("release", [False, True])
def test_an_update_that_fails_is_told_and_the_others_are_made(
    monkeypatch: pytest.MonkeyPatch, release: bool
) -> None:
    monkeypatch.setattr(host_update, "CHUNK_BYTES", 2 * SIDE * SIDE * 4)  # a layer each
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters())
        paged = umem.page_optimizer(optimizer, update="host", release_gradients=release)
        before = [copies(p) for p in net.parameters()]
        real, calls = parts.update, []

        def fails_once(*args: Any) -> None:
            calls.append(args)
            if len(calls) == 2:
                raise RuntimeError("no luck")
            real(*args)

        monkeypatch.setattr(host_update, "update", fails_once)
        net(torch.randn(32, SIDE)).backward()
        with pytest.raises(StateError, match=r"of \d+ of \d+ parameters failed: no luck"):
            optimizer.step()
        changed = [not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)]
        assert 0 < sum(changed) < sum(p.requires_grad and p.numel() > 0 for p in net.parameters())
        optimizer.zero_grad()
        net(torch.randn(32, SIDE)).backward()
        optimizer.step()  # the next one continues
        paged.remove()
        del net, optimizer, before, paged
        gc.collect()


def test_an_interrupt_in_a_step_leaves_no_update_half_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter and its state are both updated, or neither is."""
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        paged = umem.page_optimizer(optimizer, update="host")
        net(torch.randn(32, SIDE)).backward()
        before = [copies(p) for p in net.parameters()]
        add, count = host_update.HostUpdate.add, 0

        def interrupted(self: Any, *given: torch.Tensor) -> None:
            nonlocal count
            count += 1
            if count == 4:
                raise KeyboardInterrupt
            add(self, *given)

        monkeypatch.setattr(host_update.HostUpdate, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        for parameter, old in zip(net.parameters(), before, strict=True):
            steps = optimizer.state[parameter].get("step", torch.zeros(()))
            assert (float(steps) == 1) == (not torch.equal(parameter, old))
        paged.remove()
        del net, optimizer, before, paged, parameter, old
        gc.collect()


def test_bad_input_is_refused() -> None:
    with pytest.raises(StateError, match="needs umem to be on"):
        umem.page_optimizer(torch.optim.Adam(Net().parameters()), update="host")
    with umem.enable(budget="64MiB", device="soft", policy="lru", host_budget="4MiB"):
        net = Net()
        adam = torch.optim.Adam(net.parameters())
        for options, match in (
            ({"update": "cpu"}, "allowed: device and host"),
            ({"update": "host", "share": 1.5}, "allowed: from 0 to 1"),
            ({"update": "host"}, r"states take about 8.* and the host budget of 4 MiB has 4 MiB"),
        ):
            with pytest.raises(ConfigError, match=match):
                umem.page_optimizer(adam, **options)
        wrapped = torch.nn.Parameter(TwoTensor(torch.zeros(4), torch.zeros(4)))
        with pytest.raises(ConfigError, match="wraps others"):
            umem.page_optimizer(torch.optim.SGD([wrapped]), update="host")
        del wrapped
        with pytest.raises(ConfigError, match="LBFGS"):
            umem.page_optimizer(torch.optim.LBFGS(net.parameters()), update="host")
        for parameter in [*net.parameters()][1:]:
            parameter.requires_grad_(False)  # and has no states
        umem.page_optimizer(adam, update="host").remove()
        net.requires_grad_()
        paged = umem.page_optimizer(adam, update="host", share=0.4)
        other = torch.optim.Adam(net.parameters())
        with pytest.raises(ConfigError, match="by another optimizer"):
            umem.page_optimizer(other, update="host", share=0.4)
        with pytest.raises(StateError, match="closure"):
            adam.step(lambda: 0.0)
        paged.remove()
        umem.page_optimizer(other, update="host", share=0.4).remove()
        del net, adam, other, paged
        gc.collect()


@pytest.mark.parametrize("masters", [False, True])
def test_the_host_budget_is_for_the_states_of_all_optimizers(masters: bool) -> None:
    dtype = torch.bfloat16 if masters else torch.float32
    budget = "16MiB" if masters else "12MiB"
    with umem.enable(budget="64MiB", device="soft", policy="lru", host_budget=budget):
        nets = [Net().to(dtype) for _ in range(2)]
        first, second = (torch.optim.Adam(n.parameters()) for n in nets)
        paged = umem.page_optimizer(first, update="host", masters=masters)
        for _ in range(2):  # before the states exist, and then
            with pytest.raises(ConfigError, match=r"host budget of 1. MiB has (3\.9|4)"):
                umem.page_optimizer(second, update="host", masters=masters)
            for parameter in nets[0].parameters():
                parameter.grad = torch.zeros_like(parameter)
            first.step()
        paged.remove()
        umem.page_optimizer(second, update="host", masters=masters).remove()
        del nets, first, second, paged, parameter
        gc.collect()


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_steps_go_on_while_umem_is_off(share: float) -> None:
    def steps(optimizer: torch.optim.Optimizer, net: Net) -> None:
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    plain_net, net = Net(), Net()
    net.load_state_dict(plain_net.state_dict())
    plain = torch.optim.AdamW(plain_net.parameters(), fused=True)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        paged = umem.page_optimizer(optimizer, update="host", share=share)
        steps(optimizer, net)
    for _ in range(2):
        steps(optimizer, net)
    for _ in range(3):
        steps(plain, plain_net)
    assert same(list(plain_net.parameters()), list(net.parameters()))
    paged.remove()


def test_a_forked_child_has_a_thread_of_its_own() -> None:
    from support import program

    code, out, err = program.run(
        """
        import warnings
        warnings.filterwarnings("ignore", ".* is multi-threaded")  # since Python 3.12
        net = torch.nn.Linear(512, 512)
        optimizer = torch.optim.AdamW(net.parameters())
        paged = umem.page_optimizer(optimizer, update="host")
        def step():
            net(torch.ones(4, 512)).sum().backward()
            optimizer.step()
            return True
        step()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if step() else 1)
        print(os.waitpid(pid, 0)[1], step())
        """
    )
    assert (code, out, err) == (0, "0 True\n", "")


def test_a_child_that_is_forked_after_the_backward_pass_steps() -> None:
    """Its gradients are released, and their updates run on a thread that it does not have."""
    from support import program

    code, out, err = program.run(
        """
        import warnings
        warnings.filterwarnings("ignore", ".* is multi-threaded")  # since Python 3.12
        from umem.offload.optimizer import host_update, parts
        host_update.CHUNK_BYTES = 1 << 20
        real = parts.update
        def update(*args):
            time.sleep(0.2)
            real(*args)
        host_update.update = update
        net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
        optimizer = torch.optim.AdamW(net.parameters())
        paged = umem.page_optimizer(optimizer, update="host", release_gradients=True)
        net(torch.ones(4, 512)).sum().backward()
        pid = os.fork()
        optimizer.step()
        if pid == 0:
            os._exit(0)
        print(os.waitpid(pid, 0)[1])
        """
    )
    assert (code, out, err) == (0, "0\n", "")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_between_backward_and_step_has_what_was_updated(
    copied: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = parts.update

    def update(*args: Any) -> None:
        time.sleep(0.1)
        real(*args)

    monkeypatch.setattr(host_update, "update", update)
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        net = Net()
        optimizer = torch.optim.Adam(net.parameters())
        paged = umem.page_optimizer(optimizer, update="host", release_gradients=True)
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        sum(parameter.sum() for parameter in trained).backward()
        found = copied(optimizer)
        steps = [float(state["step"]) for state in found.state.values()]
        assert steps == [1.0] * len(trained)
        optimizer.step()
        paged.remove()
        del net, optimizer, paged, trained, found
        gc.collect()


def on_both(make: Make, steps: int, of: Callable[[], Any], **page: Any) -> list[list[Any]]:
    """The parameters after training without umem, and with updates on the host.

    `of` makes parameters and a function that sets the gradients of a step.
    """
    found = []
    for host in (False, True):
        with contextlib.ExitStack() as stack:
            if host:
                stack.enter_context(umem.enable(budget="24MiB", device="soft", policy="lru"))
            torch.manual_seed(0)
            parameters, gradients = of()
            optimizer = make(parameters)
            paged = umem.page_optimizer(optimizer, update="host", **page) if host else None
            for step in range(steps):
                gradients(step)
                optimizer.step()
            if paged:
                paged.remove()
            found.append([torch.tensor(p.detach().double().tolist()) for p in parameters])
            del parameters, gradients, optimizer, paged
            gc.collect()
    return found


def random_gradients(parameters: list[torch.Tensor]) -> Callable[[int], None]:
    def give(_: int) -> None:
        for p in parameters:
            p.grad = torch.randn_like(p)

    return give


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_half_precision_is_updated_whole(make: Any) -> None:
    """The fused kernel of SGD leaves out whole blocks of it (pytorch/pytorch#191763)."""

    def of() -> Any:
        parameters = [torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))]
        return parameters, random_gradients(parameters)

    plain, host = on_both(lambda p: make(p, lr=0.1, foreach=False), 2, of)
    assert float((host[0] != 1).float().mean()) > 0.9
    assert torch.allclose(plain[0], host[0], atol=0.02)


@pytest.mark.parametrize("kind", ["gradient", "parameter", "states"])
@pytest.mark.parametrize("name", ["adamw", "momentum", "adagrad"])
def test_memory_in_another_order_is_updated_as_it_should(name: str, kind: str) -> None:
    """Fused kernels traverse parameter, gradient and states by address."""

    def of() -> Any:
        base = torch.randn(48, 96)
        data = base.t()[:, ::2] if kind == "parameter" else base
        parameters = [torch.nn.Parameter(data)]

        def give(step: int) -> None:
            p = parameters[0]
            gradient = (
                torch.randn(p.shape[::-1]).t() if kind == "gradient" else torch.randn(p.shape)
            )
            p.grad = gradient
            if kind == "states" and step == 1:
                p.data = p.data.t().contiguous().t()  # as .to(memory_format=...) does

        return parameters, give

    def make(parameters: Any) -> torch.optim.Optimizer:
        return type(MAKERS[name](parameters))(parameters, lr=1e-2, **options)

    options = {"momentum": 0.9} if name == "momentum" else {}
    plain, host = on_both(make, 4, of)
    assert torch.allclose(plain[0], host[0], atol=1e-5)


def test_a_parameter_that_gets_gradients_later_has_its_momentum() -> None:
    def of() -> Any:
        parameters = [torch.nn.Parameter(torch.ones(32)) for _ in range(4)]

        def give(step: int) -> None:
            for i, p in enumerate(parameters):
                p.grad = torch.randn(32) if i < 2 or step >= 2 else None

        return parameters, give

    plain, host = on_both(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 5, of)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, host, strict=True))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's, of Adagrad's step
@pytest.mark.parametrize("release", [False, True])
def test_adagrad_with_sparse_gradients(release: bool) -> None:
    """Its states exist from the start, and return to the device with the first of these."""

    def of() -> Any:
        table = torch.nn.Embedding(64, 8, sparse=True)

        def give(step: int) -> None:
            table.zero_grad()
            table(torch.arange(step, 9 + step)).square().sum().backward()

        return list(table.parameters()), give

    plain, host = on_both(
        lambda p: torch.optim.Adagrad(p, lr=0.1), 3, of, release_gradients=release
    )
    assert torch.equal(plain[0], host[0])


def test_an_interrupt_while_a_step_waits_leaves_no_update_half_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_update, "CHUNK_BYTES", 1)  # a parameter each
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        made = [torch.nn.Parameter(torch.zeros(512)) for _ in range(4)]
        optimizer = torch.optim.AdamW(made, lr=0.1, weight_decay=0.0)
        paged = umem.page_optimizer(optimizer, update="host")
        real, waits = parts.update, threading.Event()
        thread = threading.get_ident()

        def slow(*args: Any) -> None:
            if not waits.is_set():
                waits.set()
                signal.pthread_kill(thread, signal.SIGALRM)
            time.sleep(0.1)
            real(*args)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(host_update, "update", slow)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            for p in made:
                p.grad = torch.ones(512)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        finally:
            signal.signal(signal.SIGALRM, before)
        assert waits.is_set()
        for turn in (1, 2):
            done = [float(optimizer.state[p]["step"]) if optimizer.state[p] else 0.0 for p in made]
            moved = [float(p.detach()[0]) for p in made]
            assert moved == pytest.approx([-0.1 * n for n in done], abs=1e-4), turn
            optimizer.step()
        paged.remove()
        del made, optimizer, paged, p
        gc.collect()


def test_a_refused_closure_loses_no_update_of_the_backward_pass() -> None:
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        p = torch.nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([p], lr=1.0)
        paged = umem.page_optimizer(optimizer, update="host", release_gradients=True)
        p.sum().backward()
        with pytest.raises(StateError, match="closure"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(StateError, match="second gradient"):
            p.sum().backward()
        p.grad = None
        optimizer.step()
        assert p.tolist() == [-1.0] * 4
        assert optimizer.state_dict()["state"] == {}  # as without umem
        paged.remove()
        del p, optimizer, paged
        gc.collect()
    torch.ones(1, requires_grad=True).sum().backward()  # releases the pass that raised


def test_a_refused_call_leaves_nothing_behind() -> None:
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        a, b = (torch.nn.Parameter(torch.zeros(512, 512)) for _ in range(2))
        owner = torch.optim.Adam([a])
        first = umem.page_optimizer(owner, update="host")
        adam = torch.optim.Adam([a, b])
        b.grad = torch.ones_like(b)
        adam.step()
        with pytest.raises(ConfigError, match="by another optimizer"):
            umem.page_optimizer(adam, update="host")
        assert core.owns(adam.state[b]["exp_avg"].data_ptr())
        umem.page_optimizer(torch.optim.Adam([b]), update="host").remove()
        del first, owner  # without a remove(), as when a notebook's cell runs again
        umem.page_optimizer(adam, update="host").remove()
        assert all(held(adam))
        del a, b, adam
        gc.collect()


def test_what_is_left_to_the_device_comes_in_parts() -> None:
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        made = [torch.nn.Parameter(torch.zeros(MIB)) for _ in range(6)]
        adam = torch.optim.Adam(made, foreach=True)
        paged = umem.page_optimizer(adam, update="host", share=0.1)
        for _ in range(2):
            for p in made:
                p.grad = torch.ones(MIB)
            adam.step()
        assert umem.stats().ops_above_budget == 0
        assert [float(p.detach()[0]) for p in made] == pytest.approx([-2e-3] * 6, rel=1e-3)
        paged.remove()
        del made, adam, paged, p
        gc.collect()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a bad batch")


@pytest.mark.parametrize("update", ["device", "host"])
def test_a_program_may_go_on_after_a_backward_pass_that_failed(
    update: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The updates of the pass that failed are kept."""
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        net = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.Linear(SIDE, SIDE))
        lr = 2.0**-7  # exact
        torch.nn.init.zeros_(net[1].bias)
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, fused=True)
        paged = umem.page_optimizer(optimizer, update=update, release_gradients=True)
        for i in range(4):
            hidden = net[0](torch.ones(2, SIDE))
            loss = net[1](Fails.apply(hidden) if i == 1 else hidden).sum()
            with (
                pytest.raises(RuntimeError, match="bad batch")
                if i == 1
                else contextlib.nullcontext()
            ):
                loss.backward()
            if i != 1:
                optimizer.step()
        assert "failed after 2 parameters had been updated" in caplog.text
        assert caplog.text.count("failed after") == 1
        paged.remove()
        assert bool((net[1].bias == -4 * 2 * lr).all())  # four passes, two rows in each
        del net, optimizer, paged, loss, hidden


class Inner(torch.autograd.Function):
    """Runs a backward pass of its own in its backward pass, as reentrant checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.layer(x).backward(gradient)
        return x.grad, None


@pytest.mark.parametrize("update", ["device", "host"])
def test_a_backward_pass_inside_of_another_one_is_a_part_of_it(
    update: str, caplog: pytest.LogCaptureFixture
) -> None:
    def trained(page: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        first, last = (torch.nn.Linear(SIDE, SIDE) for _ in range(2))
        optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1, fused=True)
        if page:
            umem.page_optimizer(optimizer, update=update, release_gradients=True)
        for _ in range(3):
            x = torch.ones(2, SIDE, requires_grad=True)
            last(Inner.apply(x, first)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        assert all(map(torch.equal, trained(True), trained(False)))
        gc.collect()
    assert "failed after" not in caplog.text


def test_a_layer_used_by_two_inner_passes_is_refused() -> None:
    """In a process of its own, since torch keeps the graph of an inner pass that failed."""
    code, out, err = program.run(
        "from typing import Any\n"
        + inspect.getsource(Inner)
        + """
shared, between = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD([*shared.parameters(), *between.parameters()], lr=0.1, fused=True)
umem.page_optimizer(optimizer, release_gradients=True)
x = torch.ones(2, 64, requires_grad=True)
try:
    Inner.apply(between(Inner.apply(x, shared)), shared).sum().backward()
except umem.errors.StateError as error:
    print("second gradient" in str(error))
"""
    )
    assert (code, out) == (0, "True\n"), err


@pytest.mark.parametrize("update", ["device", "host"])
def test_a_backward_pass_uses_the_options_of_its_end(update: str) -> None:
    """Not those that the program sets between it and `step()`."""
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        weight = torch.nn.Parameter(torch.ones(SIDE, SIDE))
        optimizer = torch.optim.SGD([weight], lr=0.25)
        umem.page_optimizer(optimizer, update=update, release_gradients=True)
        weight.sum().backward()
        optimizer.param_groups[0]["lr"] = 100.0
        optimizer.step()
        assert bool((weight == 0.75).all())
        del weight, optimizer
        gc.collect()


def test_another_optimizers_step_inside_of_one_is_refused() -> None:
    """On the same thread it would wait for itself."""
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        weight = torch.nn.Parameter(torch.ones(SIDE))
        optimizer = torch.optim.SGD([weight], lr=0.25)
        paged = umem.page_optimizer(optimizer, update="host")
        weight.grad = torch.ones(SIDE)
        with host_update._order, pytest.raises(StateError, match="another one's step"):
            optimizer.step()
        assert bool((weight == 1).all())
        optimizer.step()  # once
        assert bool((weight == 0.75).all())
        paged.remove()
        del weight, optimizer, paged
        gc.collect()


class Counts(torch.optim.Adam):
    """Changes what the step of all its parameters calls."""

    def _init_group(self, *args: Any, **named: Any) -> Any:
        return super()._init_group(*args, **named)


def test_methods_that_the_step_calls_may_see_all_parameters() -> None:
    class Named(torch.optim.Adam):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=1e-3)

        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)

    layer = torch.nn.Linear(4, 4)
    assert parts.is_per_parameter(Named(layer.parameters()))
    assert not parts.is_per_parameter(Counts(layer.parameters()))
    with umem.enable(budget="64MiB", device="soft", policy="lru"), pytest.raises(ConfigError):
        umem.page_optimizer(Counts(layer.parameters()), update="host")
