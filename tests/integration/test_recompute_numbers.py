"""Gradients of optimized models where a rebuilt activation could easily differ from the dropped.

Programs by what is special about them; each is compared with plain torch, bit by bit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import umem  # noqa: E402
from umem.recompute.executor import forwards  # noqa: E402
from umem.recompute.optimize import report  # noqa: E402

WIDTH, BATCH, STEPS = 64, 8192, 3  # an activation has 2 MiB, the least that is dropped
Inner = Callable[["Net", Any], Any]
Step = Callable[["Net", Any], Any]


class Net(nn.Module):
    def __init__(self, inner: Inner | None = None) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.inner = inner

    def forward(self, x: Any) -> Any:
        x = functional.gelu(self.a(x))
        if self.inner is not None:
            x = self.inner(self, x)
        return self.b(functional.gelu(x))


def backward(net: Net, x: Any) -> None:
    net(x).square().mean().backward()


def train(mode: str | None, inner: Inner | None, step: Step) -> tuple[list[Any], int]:
    """Return what each step gives and all gradients after it, and how many tensors were dropped."""
    torch.manual_seed(0)
    net = Net(inner)
    if mode is not None:
        umem.optimize(net, mode=mode, budget="50%")
    found: list[Any] = []
    dropped = 0
    for i in range(STEPS):
        net.zero_grad()
        torch.manual_seed(i)
        result = step(net, torch.randn(BATCH, WIDTH))
        found += [result, *(copy.deepcopy(p.grad) for p in net.parameters())]
        dropped = 0 if mode is None else max(dropped, report(net).dropped)
    return found, dropped


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def agree(mode: str, inner: Inner | None = None, step: Step = backward) -> None:
    plain, _ = train(None, inner, step)
    found, dropped = train(mode, inner, step)
    assert equal(found, plain)
    assert dropped > 0


# --- forward passes -------------------------------------------------------------------------------


@contextlib.contextmanager
def default(dtype: Any) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def overlapping_views(_: Net, h: Any) -> Any:
    y = h.detach().clone()
    y[: BATCH // 2].expand(2, -1, -1).zero_()
    z = h.detach().clone()
    z.as_strided((BATCH // 2, 2, WIDTH), (WIDTH, 0, 1)).fill_(0.5)
    return h * y * z.sin()


def default_type(_: Net, h: Any) -> Any:
    with default(torch.float64):
        y = (h.detach() * 10).long() / 3
    return h * y.sin().float()


def change_by_data(_: Net, h: Any) -> Any:
    y = h.exp()
    y.data.clamp_(max=1.0)
    return y


class Fused(torch.autograd.Function):
    """Adds to the gradient of the parameter that it saved, and to an attribute of it."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        change = gradient.t() @ x
        weight.grad = change if weight.grad is None else weight.grad + change
        weight.total.add_(change)
        return gradient @ weight, None


def fused_gradient(net: Net, h: Any) -> Any:
    weight: Any = net.b.weight
    if not hasattr(weight, "total"):
        weight.total = torch.zeros(WIDTH, WIDTH)
    return Fused.apply(h, weight)


@pytest.mark.parametrize("mode", ["memory", "recompute"])
@pytest.mark.parametrize(
    "inner",
    [overlapping_views, default_type, change_by_data, fused_gradient],
    ids=lambda f: f.__name__,
)
def test_a_forward_pass(inner: Inner, mode: str) -> None:
    agree(mode, inner)


# --- backward passes ------------------------------------------------------------------------------


def test_functions_with_a_parameter_drop_what_else_they_save() -> None:
    def inner(net: Net, h: Any) -> Any:
        for _ in range(3):
            h = Scaled.apply(functional.gelu(net.b(h)), net.b.bias)
        return h

    agree("memory", inner)
    torch.manual_seed(0)
    net = umem.optimize(Net(inner), mode="memory", budget="50%")
    for _ in range(2):
        backward(net, torch.randn(BATCH, WIDTH))
    assert report(net).dropped >= 5


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any) -> Any:
        ctx.save_for_backward(x, None, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, _, scale = ctx.saved_tensors
        assert isinstance(scale, nn.Parameter)
        return gradient * scale, (gradient * x).sum(0)


class Cleared(Scaled):
    """Saves what torch lets go of once it was read, since 2.13."""

    clear_saved_tensors_on_access = True


def test_what_a_function_clears_at_its_access_is_left_alone() -> None:
    agree("memory", lambda net, h: Cleared.apply(h, net.b.bias))


def averaged(net: Net, h: Any) -> Any:
    state: Any = vars(net)
    state.setdefault("center", torch.zeros(WIDTH))
    with torch.no_grad():
        state["center"].mul_(0.9).add_(h.mean(0), alpha=0.1)
    return torch.sigmoid(h - state["center"])


def two_passes(net: Net, x: Any) -> None:
    (net(x) * net(x.flip(0))).mean().backward()


@pytest.mark.parametrize("mode", ["memory", "recompute", "per_block"])
def test_a_second_pass_may_update_buffers_before_the_backward_pass(mode: str) -> None:
    agree(mode, averaged, two_passes)


def test_a_change_of_what_was_first_read_by_data_is_an_error() -> None:
    inputs: list[Any] = []

    def inner(net: Net, h: Any) -> Any:
        x = torch.ones(BATCH, WIDTH)
        inputs[:] = [x]
        z = x.data.sin() * net.b.bias
        return h * z * (x + net.b.bias).sigmoid()

    def step(net: Net, x: Any) -> None:
        loss = net(x).square().mean()
        inputs[0].zero_()
        loss.backward()

    with pytest.raises(umem.StateError, match="modified by an inplace operation"):
        train("memory", inner, step)
    inputs.clear()


@pytest.mark.parametrize("rows", [1, BATCH])  # copied after the pass, and not
def test_memory_that_the_program_frees_is_not_read(rows: int) -> None:
    def inner(net: Net, h: Any) -> Any:
        with torch.no_grad():
            big = torch.ones(rows, WIDTH)
        y = (h * net.b.bias + big).sigmoid()
        big.untyped_storage().resize_(0)
        return y

    train(None, inner, backward)  # the addition saves nothing
    with pytest.raises(umem.StateError, match="freed the memory of a "):
        train("memory", inner, backward)


def test_parts_of_one_storage_are_dropped_once() -> None:
    def inner(net: Net, h: Any) -> Any:
        first, second = (h * net.b.bias).tanh().chunk(2, -1)
        return torch.cat((first * second, first + second), -1)

    torch.manual_seed(0)
    net = umem.optimize(Net(inner), mode="memory", budget="50%")
    for _ in range(2):
        backward(net, torch.randn(BATCH, WIDTH))
    tensors = report(net).dropped_bytes / (BATCH * WIDTH * 4)
    assert tensors == int(tensors) < report(net).dropped


def test_a_look_at_data_keeps_nothing() -> None:
    def inner(net: Net, h: Any) -> Any:
        y = functional.gelu(h).mul_(2)
        out = (y * y).sum(1, keepdim=True)
        y.data.abs().mean()
        vars(net)["storage"] = weakref.ref(y.untyped_storage())
        return out * h

    torch.manual_seed(0)
    net = umem.optimize(Net(inner), mode="memory", budget="50%")
    for _ in range(3):
        out = net(torch.randn(BATCH, WIDTH))
        alive = vars(net)["storage"]()
        out.sum().backward()
    assert alive is None
    agree("memory", inner)


def float32_island(net: Net, h: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return functional.gelu(net.b(h.float()))


def backward_in_autocast(net: Net, x: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(x).float().square().mean().backward()


@pytest.mark.parametrize("mode", ["memory", "per_block", "recompute"])
def test_backward_within_autocast(mode: str) -> None:
    agree(mode, float32_island, backward_in_autocast)


def batched(net: Net, x: Any) -> Any:
    out = net(x).sum(0)[:2]
    return torch.autograd.grad(out, [*net.parameters()], torch.eye(2), is_grads_batched=True)


def test_batched_gradients_of_a_random_op() -> None:
    agree("memory", lambda _, h: functional.dropout(h, 0.5), batched)


def other_memory(net: Net, x: Any) -> None:
    loss = net(x).square().mean()
    net.b.weight.data = net.b.weight.data * 2
    loss.backward()


def test_a_parameter_has_other_memory_at_its_use() -> None:
    agree("memory", None, other_memory)


def nested(net: Net, x: Any) -> Any:
    rows = torch.nested.nested_tensor([x[: BATCH // 2], x[BATCH // 2 :]])
    out = torch.nested.to_padded_tensor(net(rows), 0.0).sum()
    out.backward()
    return out


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_inputs_are_left_alone() -> None:
    plain, _ = train(None, None, nested)
    assert equal(train("memory", None, nested)[0], plain)


class Branches(nn.Module):
    """Results that depend on one chain of ops in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> list[Any]:
        y = torch.sin(self.a(x)).add_(1).mul_(1.5).add_(0.25).mul_(0.7).sub_(0.3)
        return [f(y) for f in (torch.exp, torch.cos, torch.sigmoid, torch.tanh)]


def by_threads(net: Branches) -> list[Any]:
    outs = net(torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1)))
    barrier, found = threading.Barrier(len(outs)), [None] * len(outs)

    def run(i: int) -> None:
        barrier.wait()
        found[i] = torch.autograd.grad(outs[i].sum(), net.a.weight, retain_graph=True)[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(outs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_threads_that_run_one_graph_backward() -> None:
    torch.manual_seed(0)
    net = Branches()
    plain = by_threads(net)
    umem.optimize(net, mode="recompute", budget="60%")
    for _ in range(3):
        sum(out.sum() for out in net(torch.randn(BATCH, WIDTH))).backward()
    for _ in range(20):
        assert equal(by_threads(net), plain)
    assert report(net).dropped > 0


@pytest.mark.parametrize("when", ["in forward", "after it"])
def test_a_change_of_a_dropped_tensor_is_the_error_of_torch(when: str) -> None:
    def inner(net: Net, h: Any) -> Any:
        net.kept = y = h.exp()
        if when == "in forward":
            y.add_(1)
        return y

    def step(net: Net, x: Any) -> None:
        loss = net(x).square().mean()
        if when == "after it":
            net.kept.add_(1)  # type: ignore[operator]
        loss.backward()

    for mode in (None, "memory"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            train(mode, inner, step)


# --- the model ------------------------------------------------------------------------------------


def test_a_copy_runs_itself() -> None:
    net = umem.optimize(Net(), mode="memory")
    copied, replica = copy.copy(net), net._replicate_for_data_parallel()
    for other in (copied, replica):
        other.inner = lambda _, h: h * 2
        x = torch.ones(4, WIDTH)
        assert not torch.equal(other(x), net(x))
    umem.deoptimize(net)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_pickles_and_signatures_are_those_of_the_program() -> None:
    net = umem.optimize(Net(), mode="memory")
    assert b"umem" not in pickle.dumps(net)
    # In a pickle of the class itself, as of cloudpickle for classes of scripts.
    assert pickle.loads(pickle.dumps(forwards._runs)) == {}
    assert [*inspect.signature(net.forward).parameters] == ["x"]
    assert inspect.getsource(net.forward) == inspect.getsource(inspect.unwrap(Net.forward))
    assert torch.jit.script(umem.optimize(nn.Sequential(nn.Linear(4, 4)), mode="memory"))
    assert not copy.deepcopy(net)(torch.ones(4, WIDTH)).isnan().any()
    umem.deoptimize(net)


def heir_of(base: type[Net]) -> type[Net]:
    """Return a class whose forward no other test's model has wrapped."""

    class Heir(base):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return super().forward(x) + 1

    return Heir


def test_a_model_is_freed_with_its_last_reference_and_leaves_its_class_as_it_was() -> None:
    heir = heir_of(Net)
    own = heir.__dict__["forward"]
    net = umem.optimize(heir(), mode="memory")
    assert heir.__dict__["forward"] is not own
    alive = weakref.ref(net)
    gc.disable()
    try:
        del net
        assert alive() is None
    finally:
        gc.enable()
    assert heir.__dict__["forward"] is own


def test_a_class_and_its_base_may_both_be_optimized() -> None:
    torch.manual_seed(0)
    base = heir_of(Net)
    heir, net = heir_of(base)(), base()
    x = torch.randn(BATCH, WIDTH)
    plain = [copy.deepcopy(each)(x) for each in (heir, net)]
    for each in (heir, net):
        umem.optimize(each, mode="memory")
    assert equal([each(x) for each in (heir, net)], plain)
    assert report(heir).dropped > 0
    umem.deoptimize(net)
    assert forwards.run_of(heir) is not None
    umem.deoptimize(heir)
    assert "__wrapped__" not in vars(base.forward)


def wrapped(net: nn.Module) -> None:
    inside = net.forward

    @functools.wraps(inside)
    def forward(*args: Any, **named: Any) -> Any:
        return inside(*args, **named)

    net.forward = forward


@pytest.mark.parametrize("before", [False, True])
def test_others_may_wrap_the_forward_of_an_object_at_any_time(before: bool) -> None:
    net = Net()
    if before:
        wrapped(net)
    umem.optimize(net, mode="memory")
    wrapped(net)
    for _ in range(2):
        backward(net, torch.randn(BATCH, WIDTH))
    found = report(net)
    assert found.dropped > 0
    umem.deoptimize(net)
    found.dropped = -1
    backward(net, torch.randn(BATCH, WIDTH))
    assert found.dropped == -1


def test_a_class_whose_forward_was_replaced_is_changed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = umem.optimize(Net(), mode="memory")
    monkeypatch.setattr(Net, "forward", inspect.unwrap(Net.forward))
    second = umem.optimize(Net(), mode="memory")
    for _ in range(2):
        backward(second, torch.randn(BATCH, WIDTH))
    assert report(second).dropped > 0
    for net in (first, second):
        umem.deoptimize(net)


def test_the_programs_own_apply_is_left_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    own: Any = vars(torch.autograd.Function)["apply"]
    calls: list[Any] = []

    @classmethod  # type: ignore[misc]
    def apply(cls: Any, *args: Any) -> Any:
        calls.append(cls)
        return own.__get__(None, cls)(*args)

    monkeypatch.setattr(torch.autograd.Function, "apply", apply)
    net = umem.optimize(Net(lambda net, h: Scaled.apply(h, net.b.bias)), mode="memory")
    for _ in range(2):
        backward(net, torch.randn(BATCH, WIDTH))
    assert calls == [Scaled, Scaled]
    assert vars(torch.autograd.Function)["apply"] is apply
    umem.deoptimize(net)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        vars(self)["frozen"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "frozen" in vars(self):
            raise AttributeError(name)
        super().__setattr__(name, value)

    def forward(self, x: Any) -> Any:
        return self.a(x)


class Computed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    @property
    def forward(self) -> Any:  # type: ignore[override]
        return self.a


@pytest.mark.parametrize("made", [Frozen, Computed])
def test_unusual_models_train_with_the_option(made: Any) -> None:
    with umem.enable(budget="64MiB", device="soft", policy="lru", recompute="auto"):
        net = made()
        for _ in range(3):
            net(torch.ones(2, WIDTH)).sum().backward()
    with (
        pytest.raises(umem.NotSupportedError, match="is no function")
        if made is Computed
        else (contextlib.nullcontext())
    ):
        umem.optimize(made(), mode="memory")
