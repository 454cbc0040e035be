"""Forward passes that drop saved tensors: the same gradients, less memory, true reports."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.recompute import (  # noqa: E402
    FREED,
    Freed,
    freed_of,
    gradients,
    names_of,
    plan_for,
    same,
)
from support.recompute_nets import Convolutional, transformer  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.autograd import Function  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from umem.errors import StateError  # noqa: E402
from umem.recompute.executor import forward as forward_module  # noqa: E402
from umem.recompute.executor.forward import Prepared, Tally, Unplanned, dropping  # noqa: E402
from umem.recompute.planner.plan import RecomputePlan  # noqa: E402

EACH_FREED = pytest.mark.parametrize("freed", FREED)
Forward = Callable[..., Tensor]


def compare(
    forward: Forward,
    net: nn.Module,
    x: Tensor,
    freed: Freed = "none",
    keep: tuple[str, ...] = (),
    *,
    mismatch: str = "",
) -> Tally:
    """Run a step plainly and under a plan: gradients, buffers and the generator must agree.

    The plan drops something, up to the op at which the step is another one, if there is one.
    """
    scratch, plain = copy.deepcopy(net), copy.deepcopy(net)
    plan = plan_for(lambda: forward(scratch, x.detach().requires_grad_()), keep, freed)

    def step(model: nn.Module, tally: list[Tally]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        torch.manual_seed(3)
        given = x.detach().clone().requires_grad_()
        if model is plain:
            out = forward(model, given)
        else:
            with dropping(Prepared(plan)) as counts:
                out = forward(model, given)
            tally.append(counts)
        out.square().mean().backward()
        assert given.grad is not None
        return [*gradients(model), given.grad], list(model.buffers()), torch.get_rng_state()

    tally: list[Tally] = []
    expected, found = step(plain, tally), step(net, tally)
    assert same(expected[0], found[0])
    assert same(expected[1], found[1])
    assert torch.equal(expected[2], found[2])
    assert tally[0].mismatch == mismatch
    assert tally[0].dropped > 0
    return tally[0]


def call(net: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = net(x)
    return out


@EACH_FREED
@pytest.mark.parametrize("keep", [(), ("convolution",), ("relu", "native_batch_norm")])
def test_a_convolutional_net_has_the_same_gradients(freed: Freed, keep: tuple[str, ...]) -> None:
    tally = compare(call, Convolutional(), torch.randn(4, 3, 16, 16), freed, keep)
    assert tally.mismatch == ""
    assert tally.dropped >= 10


@EACH_FREED
@pytest.mark.parametrize("keep", [(), ("addmm", "mm"), ("native_layer_norm", "add")])
def test_a_transformer_has_the_same_gradients(freed: Freed, keep: tuple[str, ...]) -> None:
    tally = compare(call, transformer(), torch.randn(2, 8, 32), freed, keep)
    assert tally.mismatch == ""
    assert tally.dropped >= 15
    assert tally.refused == 0


@EACH_FREED
def test_in_bfloat16_under_autocast(freed: Freed) -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = net(x)
        return out.float()

    assert compare(forward, transformer(), torch.randn(2, 8, 32), freed).dropped >= 20


class Watch:
    """For each of a module's hidden tensors, whether its storage is alive."""

    def __init__(self, net: nn.Module) -> None:
        self.alive: list[weakref.ref[Any]] = []
        for part in net.modules():
            if not list(part.children()):
                part.register_forward_hook(self._made)

    def _made(self, _net: object, _args: object, out: Tensor) -> None:
        self.alive.append(weakref.ref(out.untyped_storage()))

    def count(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self.alive)


def tanhs(n: int) -> nn.Module:
    return nn.Sequential(*(nn.Tanh() for _ in range(n)))


@EACH_FREED
def test_what_is_dropped_is_freed_and_what_is_rebuilt_too(freed: Freed) -> None:
    net = tanhs(8)
    watch = Watch(net)
    x = torch.randn(64, requires_grad=True)
    names = names_of(lambda: net(x))
    watch.alive.clear()
    out = net(x)
    assert watch.count() == 8
    watch.alive.clear()
    drop = [i for i in range(8) if i != 4]
    plan = RecomputePlan(names, tuple(drop), freed_of(drop, freed))
    with dropping(Prepared(plan)):
        out = net(x)
    assert watch.count() == 2  # the one that is kept, and the output
    out.sum().backward()
    del out
    assert watch.count() == 0


@pytest.mark.parametrize(("freed", "times"), [("none", 7), ("some", 12), ("all", 28)])
def test_how_often_the_ops_run_again(freed: Freed, times: int) -> None:
    net = tanhs(7)
    x = torch.randn(64, requires_grad=True)
    plan = plan_for(lambda: net(x), freed=freed)
    with dropping(Prepared(plan)):
        out = net(x)
    loss = out.sum()
    assert names_of(loss.backward).count("aten.tanh.default") == times


def test_values_rebuilt_on_the_way_are_freed_where_the_plan_says_so() -> None:
    """The peak of rebuilding the last of a chain is a few tensors, not the chain."""
    net = tanhs(50)
    x = torch.randn(1000, requires_grad=True)
    peak = {}
    for freed in FREED:
        plan = plan_for(lambda: net(x), freed=freed)
        with dropping(Prepared(plan)):
            loss = net(x).sum()
        with _Alive() as alive:
            loss.backward()
        peak[freed] = alive.peak
    assert peak["none"] > 45
    assert 15 < peak["some"] < 35
    assert peak["all"] < 8


class _Alive(TorchDispatchMode):
    """The peak number of live storages of results."""

    def __init__(self) -> None:
        super().__init__()
        self.refs: dict[int, weakref.ref[Any]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            storage = out.untyped_storage()
            self.refs[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, sum(ref() is not None for ref in self.refs.values()))
        return out


@EACH_FREED
def test_a_long_chain_does_not_recurse(freed: Freed) -> None:
    def forward(_net: nn.Module, x: Tensor) -> Tensor:
        for _ in range(3000):
            x = x * 1.0001
        return x.tanh().sin()

    compare(forward, nn.Identity(), torch.randn(4), freed)


@EACH_FREED
def test_an_input_that_is_overwritten_in_forward_is_copied_before(freed: Freed) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16))
            self.register_buffer("mean", torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            hidden = ((x - self.mean) * self.weight).tanh()
            self.mean.mul_(0.5).add_(x.detach())
            return (hidden * self.mean).sin() * hidden

    assert compare(call, Net(), torch.randn(16), freed).dropped >= 3


@EACH_FREED
def test_views_that_are_written_in_place(freed: Freed) -> None:
    def forward(_net: nn.Module, x: Tensor) -> Tensor:
        hidden = (x * 2).view(4, 4)
        hidden[1].mul_(3)
        hidden[:, 2:].relu_()
        first, second = hidden.chunk(2, 0)
        first = first.sin()
        return torch.cat([first, second.clone().tanh_()]).exp() * hidden

    compare(forward, nn.Identity(), torch.randn(16), freed)


@EACH_FREED
def test_a_buffer_filled_piece_by_piece(freed: Freed) -> None:
    def forward(_net: nn.Module, x: Tensor) -> Tensor:
        held = torch.empty(2, 16)
        held[0].copy_(x.sin())
        held[1].copy_(x.cos())
        return held.exp().tanh()

    compare(forward, nn.Identity(), torch.randn(16), freed)


@EACH_FREED
def test_an_input_written_in_place(freed: Freed) -> None:
    def forward(_net: nn.Module, x: Tensor) -> Tensor:
        y = x.clone()
        return y.mul_(2).relu_().sin().add_(y.detach()).exp_()

    compare(forward, nn.Identity(), torch.randn(16), freed)


def dropped_tanhs() -> tuple[nn.Parameter, Tensor]:
    weight = nn.Parameter(torch.randn(16))
    x = torch.randn(16)

    def forward() -> Tensor:
        return ((x + weight).tanh() + 1).sin()

    plan = plan_for(forward)
    with dropping(Prepared(plan)):
        out = forward()
    return weight, out


def test_an_input_changed_after_forward_is_an_error_and_never_a_wrong_gradient() -> None:
    weight, out = dropped_tanhs()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(StateError, match=r"at version 1; expected version 0.*clone\(\)"):
        out.sum().backward()


class Energy(Function):
    """Its gradients are the saved tensors themselves."""

    @staticmethod
    def forward(ctx: Any, w: Any, h: Any) -> Any:
        ctx.save_for_backward(w, h)
        return (w * h).sum()

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        w, h = ctx.saved_tensors
        return h, w


@pytest.mark.parametrize("how", ["a hook", "a second time"])
def test_a_freed_copy_that_became_a_gradient_and_was_changed_is_not_used_again(how: str) -> None:
    def forward(w: Tensor, v: Tensor) -> Tensor:
        h = torch.tanh(v)
        total: Tensor = torch.square(h).sum() + Energy.apply(w, h)
        return total

    def leaves() -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.randn(4, requires_grad=True) for _ in range(2)]

    def found(plan: RecomputePlan | None) -> list[Any]:
        w, v = leaves()
        with dropping(Prepared(plan)) if plan else contextlib.nullcontext():
            out = forward(w, v)
        if how == "a hook":

            def scale(leaf: Tensor) -> None:
                leaf.grad.mul_(100.0)

            w.register_post_accumulate_grad_hook(scale)
            out.backward()
        else:
            out.backward(retain_graph=True)
            w.grad.zero_()
            v.grad.zero_()
            out.backward()
        return [w.grad, v.grad]

    names = names_of(lambda: forward(*leaves()))[2:]  # without those that create the leaves
    tanh = names.index("aten.tanh.default")
    plan = RecomputePlan(names, (tanh,), (tanh,))
    for expected, got in zip(found(None), found(plan), strict=True):
        assert torch.equal(expected, got)


def test_parts_with_version_counters_of_their_own() -> None:
    """A reader of the whole keeps its content before a write, though no counter shows it."""

    def loss(w: Any) -> Any:
        x = (w * 1).add_(0.5)
        parts = [part.sigmoid() for part in torch.unsafe_split(x, 2, 1)]
        y = x.mul_(3.0)
        return sum((part * part).sum() for part in parts) + y.sin().sum()

    w = torch.randn(3, 4, requires_grad=True)
    names = tuple(names_of(lambda: loss(w)))
    expected = torch.autograd.grad(loss(w), w)[0]
    for count in (1, 2, 3):
        for drop in itertools.combinations(range(len(names)), count):
            with dropping(Prepared(RecomputePlan(names, drop))):
                made = loss(w)
            assert torch.equal(torch.autograd.grad(made, w)[0], expected), drop


def test_a_kept_tensor_changed_after_forward_is_an_error_as_in_torch() -> None:
    x = torch.randn(16, requires_grad=True)
    plan = RecomputePlan(names_of(lambda: x.exp()), ())
    with dropping(Prepared(plan)):
        y = x.exp()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Twice(Function):
    """Saves an input and an output, and writes memory without torch's knowledge."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.numpy()[:] = 2 * x.detach().numpy() ** 2  # as a kernel that torch does not know
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        return gradient * 2 * out / x


@EACH_FREED
def test_a_function_with_its_own_backward(freed: Freed) -> None:
    def forward(_net: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = Twice.apply((x + 3).exp()).sin()
        return out.tanh()

    assert compare(forward, nn.Identity(), torch.rand(16), freed).dropped >= 2


@EACH_FREED
def test_hooks_of_the_users_win_inside(freed: Freed) -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor * 1

    def forward(_net: nn.Module, x: Tensor) -> Tensor:
        x = x.sin().tanh()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            x = x.exp().cos()
        return x.sigmoid().tanh()

    compare(forward, nn.Identity(), torch.rand(16), freed)
    assert len(packed) >= 2 * 3


@EACH_FREED
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_the_users_are_left_alone(freed: Freed, reentrant: bool) -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        x = x.sin().tanh()
        out: Tensor = checkpoint(net, x, use_reentrant=reentrant)
        return out.sigmoid().tanh()

    net = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh())
    assert compare(forward, net, torch.rand(4, 16), freed).dropped >= 2


@EACH_FREED
def test_backward_twice_and_gradients_of_gradients(freed: Freed) -> None:
    x = torch.rand(16, requires_grad=True)

    def forward() -> Tensor:
        return (x.sin().tanh() * x).exp().tanh()

    def all_gradients(out: Tensor) -> list[Tensor]:
        (once,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(again.square().sum(), x)
        return [once, again.detach(), second]

    with dropping(Prepared(plan_for(forward, freed=freed))) as tally:
        out = forward()
    assert tally.dropped >= 3
    assert same(all_gradients(forward()), all_gradients(out))


@EACH_FREED
def test_a_gradient_inside_of_the_forward_pass(freed: Freed) -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        hidden = net(x).tanh()
        (penalty,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
        return (hidden * penalty.square()).sin().tanh()

    # `plan_for` sees the ops of that gradient, which are none of the forward pass's.
    words = "op 5 is aten.pow.Tensor_Scalar, planned was aten.expand.default"
    compare(forward, nn.Linear(8, 8), torch.rand(4, 8), freed, mismatch=words)


@EACH_FREED
def test_another_forward_pass_than_planned_keeps_everything_from_there(freed: Freed) -> None:
    x = torch.rand(16, requires_grad=True)

    def forward(branch: bool) -> Tensor:
        y = x.sin().tanh().exp()
        y = y.cos() if branch else y.sigmoid()
        return y.tanh().sin()

    plan = plan_for(lambda: forward(True), freed=freed)
    with dropping(Prepared(plan)) as tally:
        out = forward(False)
    assert tally.mismatch == "op 3 is aten.sigmoid.default, planned was aten.cos.default"
    assert tally.dropped == 2  # the results of tanh and exp; not later ones
    (found,) = torch.autograd.grad(out.sum(), x)
    (expected,) = torch.autograd.grad(forward(False).sum(), x)
    assert torch.equal(found, expected)


@EACH_FREED
def test_shapes_that_depend_on_data(freed: Freed) -> None:
    def forward(_net: nn.Module, x: Tensor) -> Tensor:
        y = x.sin().tanh()
        chosen = y[(y > 0.3).nonzero().squeeze(1)].exp().tanh()
        return chosen * float(y.detach().max().item()) * y[y < 0.9].sum().sin()

    compare(forward, nn.Identity(), torch.rand(16), freed)


@EACH_FREED
def test_complex_and_conjugated_tensors(freed: Freed) -> None:
    def forward(_net: nn.Module, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x.sin())
        return torch.fft.irfft(spectrum * spectrum.conj() * spectrum).tanh().exp()

    compare(forward, nn.Identity(), torch.rand(16), freed)


@EACH_FREED
def test_recurrent_nets(freed: Freed) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.lstm(x)[0].tanh()
            return out.sin()

    compare(call, Net(), torch.rand(5, 4, 8), freed)


def test_a_generator_of_the_programs_own() -> None:
    generator = torch.Generator()

    def forward(_net: nn.Module, x: Tensor) -> Tensor:
        noise = torch.rand(16, generator=generator.manual_seed(5))
        more = torch.rand(16, generator=generator)
        return (x * noise).sin() * (x * more).tanh()

    compare(forward, nn.Identity(), torch.rand(16))


@pytest.mark.parametrize(
    "draw", [torch.poisson, lambda rate, generator: torch.binomial(rate * 4, rate / 9, generator)]
)
def test_a_generator_that_is_not_given_by_its_name(draw: Callable[..., Tensor]) -> None:
    generator, rate = torch.Generator(), torch.full((64,), 3.0)

    def forward(_net: nn.Module, x: Tensor) -> Tensor:
        return (x * draw(rate, generator.manual_seed(5))).sin() * (x * draw(rate, generator)).tanh()

    tally = compare(forward, nn.Identity(), torch.rand(64))
    assert tally.dropped > 0


def test_without_gradients_nothing_is_dropped() -> None:
    net = transformer()
    x = torch.randn(2, 8, 32)
    plan = plan_for(lambda: net(x))
    with torch.no_grad(), dropping(Prepared(plan)) as tally:
        net(x)
    assert (tally.dropped, tally.mismatch) == (0, "")


def test_an_error_in_the_forward_pass_leaves_nothing_behind() -> None:
    x = torch.rand(16, requires_grad=True)
    plan = plan_for(lambda: x.sin().tanh())
    held = []

    def forward() -> None:
        held.append(weakref.ref(x.sin().untyped_storage()))
        raise ValueError("of the program")

    with dropping(Prepared(plan)), pytest.raises(ValueError, match="of the program"):
        forward()
    assert held[0]() is None
    assert names_of(lambda: x.sin().sum().backward()).count("aten.sin.default") == 1


def part_a(tensor: Any) -> Any:
    return tensor.a


def test_tensors_of_a_subclass_are_kept() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    weight = nn.Parameter(TwoTensor(torch.rand(4), torch.rand(4)))
    x = torch.rand(4)

    def forward() -> Tensor:
        return ((x.sin() * weight).tanh() * x).exp().sum()

    with dropping(Prepared(plan_for(forward))) as tally:
        out = forward()
    assert tally.refused >= 2
    out.backward()
    found, weight.grad = weight.grad, None
    forward().backward()
    assert torch.equal(part_a(found), part_a(weight.grad))


def test_a_functions_in_place_kernel_is_not_missed() -> None:
    class Halve(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            x.detach().numpy()[:] /= 2
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient / 2

    def forward(_net: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = Halve.apply(x * 3)
        return out.sin().tanh()

    compare(forward, nn.Identity(), torch.rand(16))


def _pairs(net: nn.Module, x: Tensor) -> Tensor:
    h: Tensor = net(x)
    pairs = torch.view_as_complex(h.unflatten(-1, (-1, 2)))
    return (pairs * pairs).abs() + h.sum()


def _scaled_graph(net: nn.Module, x: Tensor) -> Tensor:
    h: Tensor = net(x)
    graph = torch.eye(4).to_sparse()
    graph.mul_(2)
    return torch.sparse.mm(graph, h).exp()


@EACH_FREED
@pytest.mark.parametrize("forward", [_pairs, _scaled_graph])
def test_views_of_another_dtype_and_writes_to_sparse_tensors(
    freed: Freed, forward: Forward
) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    assert compare(forward, net, torch.randn(4, 8), freed).dropped > 0


class _Sines(TorchDispatchMode):
    """The number of sines."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.sin.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("side", [1, 7])  # ops beside the addition of each link
def test_a_long_chain_without_a_plan_takes_linear_time(
    side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unplanned, "keep_below", 0)
    monkeypatch.setattr(forward_module, "_CHAIN", 31)  # 1/4 of what it is
    monkeypatch.setattr(forward_module, "_CUT", 2)

    def ran(links: int) -> int:
        weight = torch.ones(4, requires_grad=True)
        with dropping(Unplanned(cheap=True)):
            x = weight * 1
            for _ in range(links):
                y = x
                for _ in range(side):
                    y = torch.sin(y)
                x = x + y
        with _Sines() as sines:
            x.sum().backward()
        return sines.count

    links = 400 // (side + 1)
    first, second = ran(links), ran(2 * links)
    assert links < first < second < 3 * first


def test_an_op_with_another_result_when_it_runs_again_is_an_error() -> None:
    """NumPy writes the mask, which torch does not see."""
    array = np.arange(1 << 17) < 2  # smaller ones are copied
    mask, weight = torch.from_numpy(array), torch.ones((), requires_grad=True)

    def forward() -> Tensor:
        return (torch.ones(1 << 17)[mask] * weight).sum()

    with dropping(Prepared(plan_for(forward))):
        out = forward()
    array[:] = True
    words = (
        r"aten.index.Tensor gave a torch.float32 tensor of shape \[2\] and strides \[1\] in the "
        r"forward pass and a torch.float32 tensor of shape \[131072\] and strides \[1\] when it "
        r"ran again, .* umem\.deoptimize\(model\)"
    )
    with pytest.raises(StateError, match=words):
        out.backward()


def test_foreign_operators_are_kept_as_they_may_differ_when_they_run_again() -> None:
    sizes = itertools.count(1)
    with torch.library._scoped_library("umem_tests", "FRAGMENT") as library:
        library.define("longer(Tensor x) -> Tensor")
        library.impl("longer", lambda x: x.new_ones(next(sizes)), "CompositeExplicitAutograd")
        weight = torch.ones((), requires_grad=True)

        def forward() -> Tensor:
            return (torch.ops.umem_tests.longer(torch.ones(1)) * weight).sum()

        plan = plan_for(forward)
        with dropping(Prepared(plan)) as tally:
            out = forward()
        out.backward()
    assert tally.refused == 1
    assert weight.grad == 2
