"""Tags of the blocks of a training step, with either observer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import _core_testing  # noqa: E402

import umem  # noqa: E402

BOTH = pytest.mark.parametrize("observer", ["native", "python"])
F = torch.nn.functional


@pytest.fixture
def on(observer: str) -> Iterator[None]:
    with umem.enable(budget="512MiB", device="soft", observer=observer):
        yield


def named(tensor: torch.Tensor) -> tuple[str, str]:
    """Tag and family of the tensor's block, which must be large enough to be separate."""
    base = tensor.untyped_storage().data_ptr()
    found = [(b["tag"], b["family"]) for b in _core_testing.blocks() if b["base"] == base]
    assert len(found) == 1, f"{len(found)} blocks at {base:#x}"
    return found[0]


def saved(output: torch.Tensor, name: str) -> torch.Tensor:
    value = getattr(output.grad_fn, f"_saved_{name}")
    assert isinstance(value, torch.Tensor)
    return value


@BOTH
@pytest.mark.usefixtures("on")
def test_parameters_gradients_and_optimizer_state() -> None:
    net = torch.nn.Linear(1024, 1024)
    assert named(net.weight)[0] == "param"
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(8, 1024)).sum().backward()
        optimizer.step()
        assert net.weight.grad is not None
        assert named(net.weight)[0] == "param"
        assert named(net.weight.grad)[0] == "grad"
        state = optimizer.state[net.weight]
        assert named(state["exp_avg"])[0] == "optimizer"
        assert named(state["exp_avg_sq"])[0] == "optimizer"


@BOTH
@pytest.mark.usefixtures("on")
@pytest.mark.parametrize(
    "convert", [lambda net: net.double(), lambda net: net.to_empty(device="cpu")]
)
def test_converted_parameters_and_their_gradients(convert: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(1024, 1024))
    convert(net)
    assert named(net[0].weight)[0] == "param"
    net(torch.randn(8, 1024).to(net[0].weight.dtype)).sum().backward()
    net.float()
    assert named(net[0].weight)[0] == "param"
    assert named(net[0].weight.grad)[0] == "grad"


@BOTH
@pytest.mark.usefixtures("on")
def test_parameters_that_no_hook_saw_have_their_tag_after_a_call() -> None:
    """As those of FSDP2, which writes a module's table itself."""
    net = torch.nn.Linear(1024, 1024)
    net._parameters["weight"] = torch.nn.Parameter(net.weight * 2)
    assert named(net.weight)[0] != "param"
    with torch.no_grad():
        net(torch.randn(8, 1024))
    assert named(net.weight)[0] == "param"


class Named(torch.nn.Linear):
    """Has what torch means by `parameters` replaced, as a program's configuration may."""

    parameters: Any = None


def test_modules_whose_parameters_are_no_parameters_are_called_as_without_umem() -> None:
    net = Named(1024, 1024)
    with umem.enable(budget="64MiB", device="soft"):
        weight = torch.randn(1024, 1024, requires_grad=True) * 2  # no leaf
        x = torch.randn(8, 1024)
        out = torch.func.functional_call(net, {"weight": weight}, (x,))
        assert torch.equal(out, torch.nn.functional.linear(x, weight, net.bias))
        assert named(weight)[0] != "param"
        del weight, x, out


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it
def test_compiled_code_may_convert_a_module() -> None:
    class Converts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer.float()(x)
            return out

    torch._dynamo.reset()
    with umem.enable(budget="64MiB", device="soft"):
        net = Converts()
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(2, 8)), net(torch.ones(2, 8)))
        del net, compiled
    torch._dynamo.reset()


def test_torchs_way_of_converting_is_back_afterwards() -> None:
    before = torch.nn.Module._apply
    with umem.enable(budget="64MiB", device="soft"):
        assert torch.nn.Module._apply is not before
    assert torch.nn.Module._apply is before


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, such as a DTensor."""

    inner: torch.Tensor
    mesh = "no tensor"

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "mesh"], None  # since torch 2.14 not only tensors

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*(arg.inner if isinstance(arg, Wrapper) else arg for arg in args))
        return Wrapper(out) if isinstance(out, torch.Tensor) else out


@BOTH
@pytest.mark.usefixtures("on")
def test_the_tensors_in_a_wrapper_have_its_tag() -> None:
    net = torch.nn.Module()
    net.weight = torch.nn.Parameter(Wrapper(torch.randn(1024, 1024)))
    assert named(net.weight.inner)[0] == "param"
    umem.evict(net.weight)
    assert umem.where(net.weight.inner).resident_bytes == 0


@BOTH
@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("trained", [False, True])
def test_loaded_optimizer_state_is_state_before_and_after_a_step(trained: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(1024, 1024))
    optimizer = torch.optim.AdamW([weight])
    moments = {name: torch.ones(1024, 1024) for name in ("exp_avg", "exp_avg_sq")}
    stored = {"step": torch.tensor(1.0), **moments}
    for _ in range(4 * trained):
        weight.square().sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {0: stored}})
    for _ in range(2):
        assert named(optimizer.state[weight]["exp_avg_sq"])[0] == "optimizer"
        assert umem.sleep(["optimizer"]).bytes > 0
        umem.wake()
        weight.square().sum().backward()
        optimizer.step()


def test_torchs_way_of_loading_is_back_afterwards() -> None:
    before = torch.optim.Optimizer.load_state_dict
    with umem.enable(budget="32MiB", device="soft"):
        assert torch.optim.Optimizer.load_state_dict is not before
    assert torch.optim.Optimizer.load_state_dict is before


@BOTH
@pytest.mark.usefixtures("on")
def test_a_lazy_module_gets_its_parameters_when_it_is_called() -> None:
    net = torch.nn.LazyLinear(1024)
    output = net(torch.randn(8, 1024))
    optimizer = torch.optim.SGD(net.parameters())
    output.sum().backward()
    optimizer.step()
    assert named(net.weight)[0] == "param"


@pytest.mark.parametrize("observer", ["native"])
@pytest.mark.usefixtures("on")
def test_gradients_are_known_before_any_optimizer_step() -> None:
    net = torch.nn.Linear(1024, 1024)
    for _ in range(2):  # the second adds to what is there
        net(torch.randn(8, 1024)).sum().backward()
        assert net.weight.grad is not None
        assert named(net.weight.grad)[0] == "grad"


@BOTH
@pytest.mark.usefixtures("on")
def test_activations_carry_the_family_of_their_op() -> None:
    image = torch.randn(16, 3, 128, 128)
    assert named(image)[0] == "input"
    conv = torch.nn.Conv2d(3, 8, 3, padding=1)(image)
    norm = torch.nn.BatchNorm2d(8)(conv)
    relu = norm.relu()
    pool = F.max_pool2d(relu, 2)
    assert named(conv) == ("activation", "conv")
    assert named(norm) == ("activation", "norm")
    assert named(relu) == ("activation", "elementwise")
    assert named(pool) == ("activation", "pooling")


@BOTH
@pytest.mark.usefixtures("on")
def test_attention_linear_and_embedding() -> None:
    tokens = torch.nn.Embedding(64, 256)(torch.randint(64, (8, 512)))
    linear = torch.nn.Linear(256, 256, bias=False)(tokens)
    heads = linear.view(8, 512, 4, 64).transpose(1, 2)
    attention = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    assert named(tokens) == ("activation", "embedding")
    assert named(linear) == ("activation", "linear")
    assert named(attention) == ("activation", "attention")


@BOTH
@pytest.mark.usefixtures("on")
def test_without_gradients_results_are_temporary() -> None:
    net = torch.nn.Conv2d(3, 8, 3, padding=1)
    with torch.no_grad():
        assert named(net(torch.randn(16, 3, 128, 128)))[0] == "temp"


@BOTH
@pytest.mark.usefixtures("on")
def test_in_place_ops_keep_the_tag() -> None:
    weight = torch.nn.Linear(1024, 1024).weight
    with torch.no_grad():
        weight.mul_(0.5).add_(torch.ones(1))
    assert named(weight)[0] == "param"
    data = torch.randn(1024, 1024)
    data.clamp_(0, 1)
    assert named(data)[0] == "input"


@BOTH
@pytest.mark.usefixtures("on")
def test_state_loaded_from_a_checkpoint_is_named_again() -> None:
    net = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step() -> torch.Tensor:
        net(torch.randn(8, 1024)).sum().backward()
        optimizer.step()
        state: torch.Tensor = optimizer.state[net.weight]["momentum_buffer"]
        return state

    first = step()
    optimizer.load_state_dict(optimizer.state_dict())
    second = step()
    assert named(first)[0] == "optimizer"
    assert named(second)[0] == "optimizer"


@pytest.mark.parametrize("observer", ["native"])
@pytest.mark.usefixtures("on")
def test_recomputed_activations_are_activations() -> None:
    seen: list[tuple[str, str]] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, weight, padding=1)
        seen.append(named(y))
        return y.relu()

    weight = torch.randn(8, 8, 3, 3, requires_grad=True)
    x = torch.randn(32, 8, 64, 64, requires_grad=True)
    from torch.utils.checkpoint import checkpoint

    out = checkpoint(block, x, use_reentrant=False)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    assert seen == [("activation", "conv")] * 2


@pytest.mark.parametrize("observer", ["native"])
@pytest.mark.usefixtures("on")
def test_a_closures_forward_inside_the_optimizer_makes_activations() -> None:
    weight = torch.nn.Parameter(torch.randn(1024, 1024))
    optimizer = torch.optim.LBFGS([weight], max_iter=1)
    seen: list[tuple[str, str]] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        hidden = torch.ones(1024, 1024) @ weight
        seen.append(named(hidden))
        loss = hidden.square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert seen[0] == ("activation", "linear")
