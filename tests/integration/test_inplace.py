"""Ops that may be in place: all of them are found, and no look-alikes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.utils.checkpoint import checkpoint  # noqa: E402

from umem.lint import apply, findings  # noqa: E402
from umem.lint.calls import Call, Spec  # noqa: E402
from umem.lint.equivalence import Prober  # noqa: E402
from umem.lint.findings import Finding, LintReport  # noqa: E402

WIDTH, ROWS = 64, 256
SIZE = WIDTH * ROWS * 4  # bytes of an activation

Forward = Callable[[Any, Any], Any]


class Net(nn.Module):
    """Three linear layers, some activations, and a forward of the test's."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.relu = nn.ReLU()
        self.leaky = nn.LeakyReLU(0.1)
        self.act = nn.Hardtanh()
        self.scale = nn.Parameter(torch.ones(ROWS, WIDTH))
        self.steps = forward
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.steps(self, x)
        return out


def _make(forward: Forward, edit: Callable[[Any], object] = lambda net: None) -> Any:
    def make() -> Any:
        torch.manual_seed(0)
        net = Net(forward)
        edit(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return net, optimizer, torch.randn(ROWS, WIDTH), lambda model, batch: model(batch).sum()

    return make


def test_no_generator_of_the_program_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        net = Net(lambda net, x: net.two(net.relu(net.one(x))))
        return net, torch.optim.SGD(net.parameters()), torch.randn(ROWS, WIDTH), _sum

    seeded: list[int] = []  # by a call that seeds all devices
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    before = torch.random.get_rng_state()
    assert "in_place" in {finding.kind for finding in findings.lint(make).findings}
    assert seeded == []
    assert torch.equal(torch.random.get_rng_state(), before)


def _sum(model: Any, batch: Any) -> Any:
    return model(batch).sum()


def _found(forward: Forward, edit: Callable[[Any], object] = lambda net: None) -> list[Finding]:
    report = findings.lint(_make(forward, edit))
    return [finding for finding in report.findings if finding.kind == "in_place"]


def _ops(found: list[Finding]) -> list[str]:
    return [finding.what.partition(" ")[0] for finding in found]


def test_a_relu_after_a_linear_layer() -> None:
    make = _make(lambda net, x: net.two(net.relu(net.one(x))))
    (finding,) = (f for f in findings.lint(make).findings if f.kind == "in_place")
    assert finding.modules == ("relu",)
    assert finding.safe
    assert finding.bytes == SIZE
    assert "inplace=True in ReLU relu, made at " in finding.fix
    built = Net.__init__.__code__.co_firstlineno + 3
    assert finding.fix.endswith(f"{__file__}:{built}")
    assert finding.line.startswith(f"{__file__}:")
    checked = apply.check(make, [finding])
    assert checked.differing == []
    assert checked.compared > 10


def test_leaky_relu_keeps_its_result_in_place_and_so_one_tensor_a_call_less() -> None:
    def forward(net: Any, x: Any) -> Any:
        for layer in (net.one, net.two, net.three):
            x = net.leaky(layer(x))
        return net.one(x)

    make = _make(forward)
    report = findings.lint(make)
    (finding,) = (f for f in report.findings if f.kind == "in_place")
    assert finding.modules == ("leaky",)
    assert finding.bytes == 3 * SIZE
    # The peak is in the third's backward pass, where its result would already be freed.
    assert finding.peak_bytes == 2 * SIZE
    checked = apply.check(make, report.findings)
    assert checked.differing == []
    assert checked.peak_before - checked.peak_after == 2 * SIZE
    assert checked.peak_after == report.peak_in_place


def test_the_check_sees_what_is_not_legal() -> None:
    make = _make(lambda net, x: net.two(net.act(net.one(x)) * 1).relu() + net.act(net.one(x)))
    wrong = Finding("in_place", 1, 0, "here", "", "", ("relu",), True)
    harmful = _make(_used_later)
    assert "the loss (1)" in apply.check(harmful, [wrong]).differing
    assert apply.check(make, [wrong]).differing == []  # a relu that is never called


def test_calls_in_the_program_say_how_they_are_written() -> None:
    def forward(net: Any, x: Any) -> Any:
        h = F.relu(net.one(x))
        h = torch.tanh(net.two(h))
        h = net.three(h) * 2
        return net.one(h) + h

    fixes = sorted(finding.fix for finding in _found(forward))
    assert fixes == ["add_()", "mul_()", "relu(..., inplace=True)", "tanh_()"]
    assert not any(finding.safe for finding in _found(forward))


def test_a_residual_branch_is_written_over_the_branch_and_not_over_the_stem() -> None:
    def forward(net: Any, x: Any) -> Any:
        h = net.one(x)
        return h + net.two(h)  # the second layer saves h

    (finding,) = _found(forward)
    assert finding.fix == "add_() of the second operand with the first one"


def _used_later(net: Any, x: Any) -> Any:
    h = net.one(x)
    return net.two(net.relu(h)) + h


def _read_by_hook(net: Any, x: Any) -> Any:
    h = net.one(x)
    y = net.relu(h)
    h.register_hook(lambda gradient: gradient * 2)
    return net.two(y)


def _saved_before(net: Any, x: Any) -> Any:
    return net.two(net.relu(torch.sigmoid(net.one(x)[:, :])))


def _saved_by_the_node_before(net: Any, x: Any) -> Any:
    return net.two(net.relu(torch.exp(net.one(x)[:].clone())))


def _view_of_what_is_used_later(net: Any, x: Any) -> Any:
    h = net.one(x)
    return net.two(net.relu(h.view(-1, WIDTH))) + h


def _part(net: Any, x: Any) -> Any:
    left, right = net.one(x).chunk(2, dim=1)
    return torch.cat((net.relu(left), right), dim=1)


def _kept(net: Any, x: Any) -> Any:
    h = net.one(x)
    net.kept[:] = [h.detach()]
    return net.two(net.relu(h))


def _twice(net: Any, x: Any) -> Any:
    h = net.relu(net.one(x))  # may
    g = net.two(h)
    return net.relu(g) * g  # may not: one module


def _gradient_of(net: Any, x: Any) -> Any:
    h = net.one(x)
    y = net.relu(h)
    (gradient,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
    return y + gradient


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.x = x  # not by save_for_backward
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * ctx.x


def _held_by_a_custom_function(net: Any, x: Any) -> Any:
    h = net.one(x)
    y = Custom.apply(h)
    return net.relu(h) + y


def _input_of_the_step(net: Any, x: Any) -> Any:
    return net.one(net.relu(x))


def _parameter(net: Any, x: Any) -> Any:
    return net.one(x) @ net.relu(net.scale).t()


def _again(net: Any, x: Any) -> Any:
    def part(h: Any) -> Any:
        return net.two(net.relu(torch.sigmoid(net.one(h))))

    return checkpoint(part, x, use_reentrant=False)


def _loss_of_the_input(net: Any, x: Any) -> Any:
    h = net.one(x)
    y = net.relu(h)
    h.sum().backward(retain_graph=True)
    return y


@pytest.mark.parametrize(
    "forward",
    [
        _used_later, _read_by_hook, _saved_before, _saved_by_the_node_before, _part, _kept, _twice,
        _view_of_what_is_used_later, _gradient_of, _held_by_a_custom_function, _input_of_the_step,
        _parameter, _again, _loss_of_the_input,
    ],
)  # fmt: skip
def test_what_only_looks_legal_stays(forward: Forward) -> None:
    report = findings.lint(_make(forward))
    assert "relu" not in _ops([f for f in report.findings if f.kind == "in_place"])
    (refused,) = (refused for refused in report.refused if refused.module == "relu")
    assert refused.why
    assert refused.line.startswith(f"{__file__}:")


def test_a_module_hook_that_reads_the_input_forbids_it() -> None:
    means: list[Any] = []

    def edit(net: Any) -> None:
        net.relu.register_forward_hook(
            lambda _module, args, out: means.append((args[0].mean() - out.mean()).detach())
        )

    def harmless(net: Any) -> None:
        net.relu.register_forward_hook(lambda _module, _args, out: print(out.mean().shape))

    forward = lambda net, x: net.two(net.relu(net.one(x)))  # noqa: E731
    assert "relu" not in _ops(_found(forward, edit))
    assert _ops(_found(forward, harmless)) == ["relu"]


def test_a_full_backward_hook_forbids_it() -> None:
    def edit(net: Any) -> None:
        net.relu.register_full_backward_hook(lambda _module, _given, _taken: None)

    assert _found(lambda net, x: net.two(net.relu(net.one(x))), edit) == []


def test_ops_whose_own_backward_pass_needs_the_input_are_left() -> None:
    for act in (nn.GELU(), nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.Softplus()):
        found = _found(lambda net, x: net.two(net.act(net.one(x))),
                       lambda net, act=act: setattr(net, "act", act))  # fmt: skip
        assert found == [], act


def test_elu_rounds_otherwise_and_dropout_draws_otherwise() -> None:
    for act in (nn.ELU(), nn.SELU(), nn.CELU(0.5), nn.Dropout(0.5)):
        make = _make(lambda net, x: net.two(net.act(net.one(x))),
                     lambda net, act=act: setattr(net, "act", act))  # fmt: skip
        report = findings.lint(make)
        assert [f for f in report.findings if f.kind == "in_place"] == []
        if not isinstance(act, nn.Dropout):
            (refused,) = report.refused
            assert "rounds gradients" in refused.why


def test_dropout_in_place_keeps_a_mask_of_its_inputs_dtype() -> None:
    saved: list[Any] = []

    def pack(tensor: Any) -> Any:
        saved.append(tensor.dtype)
        return tensor

    x = torch.ones(4, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.dropout(x, 0.5, inplace=True)
    assert saved == [torch.float32]  # why native_dropout, of one byte an element, is left alone


def test_one_in_place_op_may_forbid_the_next() -> None:
    # leaky_relu_ keeps its result, which add_ would overwrite; leaky_relu keeps its input.
    def forward(net: Any, x: Any) -> Any:
        return net.two(net.leaky(net.one(x)) + 1)

    make = _make(forward)
    found = [f for f in findings.lint(make).findings if f.kind == "in_place"]
    assert len(found) == 1


@pytest.mark.parametrize("act", [nn.LeakyReLU(), nn.Sequential(nn.LeakyReLU(), nn.ReLU(True))])
def test_a_result_that_the_program_writes_over_may_not_be_kept(act: nn.Module) -> None:
    def forward(net: Any, x: Any) -> Any:
        y = net.other(net.one(x))
        if isinstance(act, nn.LeakyReLU):
            y += x
        return net.two(y)

    report = findings.lint(_make(forward, edit=lambda net: setattr(net, "other", act)))
    assert [f for f in report.findings if f.kind == "in_place"] == []
    (refused,) = report.refused
    assert "which the in-place form keeps, is written over later" in refused.why


def test_what_the_step_returns_is_used() -> None:
    def make() -> Any:
        net = Net(lambda net, x: net.one(x))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = torch.randn(ROWS, WIDTH)

        def step() -> Any:
            optimizer.zero_grad()
            before = net(x)
            loss = net.two(net.relu(before)).sum()
            (loss / 4).backward()
            optimizer.step()
            return {"loss": loss, "before": [before]}

        return net, step

    assert [f for f in findings.lint(make).findings if f.kind in ("in_place", "late")] == []


@pytest.mark.parametrize("shape", [(), (1, 1), (3,)])
@pytest.mark.parametrize("op", ["elu", "celu", "selu"])
def test_a_tensor_of_few_elements_is_tried_with_as_many_values(
    op: str, shape: tuple[int, ...]
) -> None:
    func = getattr(torch.ops.aten, op).default
    spec = Spec(shape, torch.float32, True)
    call = Call(func=func, args=(spec,), named={}, grad=True, result=0, blocks={0: 0})
    assert "rounds gradients otherwise" in Prober().verdict(call, 0).why_not


def test_checkpointed_parts_are_looked_at_both_times() -> None:
    def forward(net: Any, x: Any) -> Any:
        def part(h: Any) -> Any:
            return net.two(net.relu(net.one(h)))

        return checkpoint(part, x, use_reentrant=False)

    make = _make(forward)
    report = findings.lint(make)
    assert [f.modules for f in report.findings if f.kind == "in_place"] == [("relu",)]
    assert apply.check(make, report.findings).differing == []


def test_the_line_that_makes_a_module_that_must_stay_too() -> None:
    def edit(net: Any) -> None:
        net.relu, net.act = (nn.ReLU() for _ in range(2))

    def forward(net: Any, x: Any) -> Any:
        h = net.two(net.relu(net.one(x)))
        return net.act(h) * h

    (finding,) = (f for f in _found(forward, edit) if f.modules)
    assert finding.fix.endswith("(not in act, made there too)")


ACTS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "leaky": nn.LeakyReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid,
    "hardtanh": nn.Hardtanh, "relu6": nn.ReLU6, "elu": nn.ELU, "gelu": nn.GELU, "silu": nn.SiLU,
    "threshold": lambda: nn.Threshold(0.1, 0.0), "linear": lambda: nn.Linear(8, 8),
    "hardsigmoid": nn.Hardsigmoid, "selu": nn.SELU, "norm": lambda: nn.LayerNorm(8),
}  # fmt: skip


class Chain(nn.Module):
    """Layers one after the other; those in `skips` add the input to the output."""

    def __init__(self, names: list[str], skips: list[bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ACTS[name]() for name in names)
        self.skips = skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, skip in zip(self.layers, self.skips, strict=True):
            x = layer(x) + x if skip else layer(x)
        return x


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(sorted(ACTS)), st.booleans()), min_size=2, max_size=7))
def test_applying_changes_no_bit_of_any_chain(layers: list[tuple[str, bool]]) -> None:
    def make() -> Any:
        net = nn.Sequential(nn.Linear(8, 8), Chain(*map(list, zip(*layers, strict=True))))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return net, optimizer, torch.randn(5, 8), lambda model, batch: model(batch).square().sum()

    report: LintReport = findings.lint(make)
    checked = apply.check(make, report.findings)
    assert checked.differing == []
    assert checked.peak_after <= checked.peak_before


def _gradient_is_retained(net: Any, x: Any) -> Any:
    h = net.one(x)
    h.retain_grad()
    return net.relu(h)


def _half_of_a_storage(net: Any, x: Any) -> Any:
    h = torch.empty(2 * ROWS, WIDTH)[ROWS:].detach()
    torch.nn.init.zeros_(h)
    return net.relu(h.requires_grad_(False)) * net.one(x)


def _of_numbers(net: Any, x: Any) -> Any:
    whole = net.relu((x * 0).long() + 2)
    return net.one(x) * whole


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (_gradient_is_retained, "the gradient of its input is requested"),
        (_half_of_a_storage, "its input is laid out otherwise than its result"),
    ],
)
def test_an_input_that_cannot_be_written_over_has_its_reason(forward: Forward, why: str) -> None:
    report = findings.lint(_make(forward))
    assert "relu" not in _ops([f for f in report.findings if f.kind == "in_place"])
    assert why in [refused.why for refused in report.refused if refused.module == "relu"]


def test_an_op_on_whole_numbers_may_be_in_place() -> None:
    (finding,) = (f for f in _found(_of_numbers) if f.modules == ("relu",))
    assert finding.safe
    assert finding.bytes == 2 * SIZE  # of 64 bits


def test_a_module_that_is_sometimes_more_than_one_op_stays() -> None:
    def edit(net: Any) -> None:
        calls = iter(range(10**6))
        net.relu.register_forward_pre_hook(
            lambda _, given: (given[0] * 2,) if next(calls) % 2 else given
        )

    def forward(net: Any, x: Any) -> Any:
        return net.three(net.relu(net.two(net.relu(net.one(x)))))

    report = findings.lint(_make(forward, edit))
    (refused,) = (refused for refused in report.refused if refused.module == "relu")
    assert refused.why == "it is not one op that torch has in place"
    assert "relu" not in _ops([f for f in report.findings if f.kind == "in_place"])


def test_an_op_inside_of_one_of_torchs_functions_stays() -> None:
    assert _found(lambda net, x: net.two(F.softsign(net.one(x)))) == []
