"""Tensors that a step keeps needlessly, each planted once; and look-alikes that are needed."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from umem.errors import ConfigError, PlanError  # noqa: E402
from umem.lint import apply, findings  # noqa: E402
from umem.lint.findings import Finding  # noqa: E402

WIDTH = 64
SQUARE = WIDTH * WIDTH * 4


class Masked(nn.Module):
    """Has a mask that is the same in each, and one from `draw`."""

    def __init__(self, draw: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())
        self.register_buffer("drawn", draw())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.layer(x)) @ (self.mask * self.drawn)
        return out


def _make(
    draw: Callable[[], torch.Tensor] = lambda: torch.randn(WIDTH, WIDTH),
    loss: Callable[[Any, Any], Any] = lambda model, batch: model(batch[0]).sum(),
    edit: Callable[[Any], object] = lambda net: None,
) -> Callable[[], Any]:
    def make() -> Any:
        net = nn.Sequential(*(Masked(draw) for _ in range(3)))
        edit(net)
        batch = (torch.randn(32, WIDTH), torch.randn(48, WIDTH))
        return net, torch.optim.AdamW(net.parameters()), batch, loss

    return make


def _of(kind: str, report: findings.LintReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.kind == kind]


def test_masks_made_the_same_way_are_known_to_be_equal() -> None:
    report = findings.lint(_make())
    (finding,) = _of("duplicate", report)
    assert finding.modules == ("0.mask", "1.mask", "2.mask")
    assert finding.bytes == 2 * SQUARE
    assert finding.line == f"{__file__}:{Masked.__init__.__code__.co_firstlineno + 4}"
    # The drawn ones share a shape, with the masks too; no more is known about them.
    assert ["4 buffers" in remark for remark in report.remarks] == [True]


def test_real_values_tell_more_and_sharing_them_changes_nothing() -> None:
    equal = _make(draw=lambda: torch.randn(WIDTH, WIDTH) * 0 + 2)
    report = apply.with_values(equal, findings.lint(equal))
    names = [finding.modules for finding in _of("duplicate", report)]
    assert names == [("0.mask", "1.mask", "2.mask"), ("0.drawn", "1.drawn", "2.drawn")]
    assert not any("--values" in remark for remark in report.remarks)
    checked = apply.check(equal, report.findings)
    assert checked.differing == []
    assert checked.peak_before - checked.peak_after == 4 * SQUARE
    different = _make()
    report = apply.with_values(different, findings.lint(different))
    assert [finding.modules for finding in _of("duplicate", report)] == names[:1]


def test_modules_beside_the_model_are_told_apart_and_left_alone() -> None:
    """A frozen teacher of the same type, with paths equal to the model's."""

    def make() -> Any:
        net, optimizer, batch, _ = _make(draw=lambda: torch.ones(WIDTH, WIDTH))()
        teacher = nn.Sequential(*(Masked(lambda: torch.zeros(WIDTH, WIDTH)) for _ in range(3)))
        teacher.append(nn.ReLU()).requires_grad_(False)

        def loss(model: Any, batch: Any) -> Any:
            return (model(batch[0]) - teacher(batch[0])).square().sum()

        return net, optimizer, batch, loss

    report = apply.with_values(make, findings.lint(make))
    assert ("other Sequential.3",) in [finding.modules for finding in _of("in_place", report)]
    shared = [f.modules for f in _of("duplicate", report) if f.modules]
    masks, drawn = (tuple(f"{i}.{name}" for i in range(3)) for name in ("mask", "drawn"))
    others = [tuple(f"other Sequential.{name}" for name in names) for names in (masks, drawn)]
    assert sorted(shared) == [drawn, (*masks, *others[0]), others[1]]
    assert "outside of the model" in report.remarks[-1]
    checked = apply.check(make, report.findings)
    assert checked.differing == []
    assert len(checked.done) == 2  # masks and drawn


def test_a_sparse_buffer_is_no_finding() -> None:
    def edit(net: Any) -> None:
        net.register_buffer("graph", torch.eye(WIDTH).to_sparse())

    def found(make: Any) -> Any:
        report = apply.with_values(make, findings.lint(make))
        return [(finding.kind, finding.what, finding.modules) for finding in report.findings]

    assert found(_make(edit=edit)) == found(_make()) != []


def test_buffers_that_a_step_writes_are_no_duplicates() -> None:
    """Running statistics are equal at first, and no schema says that they are written."""

    def make() -> Any:
        net = nn.Sequential(*(nn.BatchNorm1d(256) for _ in range(3)))
        optimizer = torch.optim.SGD(net.parameters())
        return net, optimizer, torch.randn(8, 256), lambda model, batch: model(batch).sum()

    report = apply.with_values(make, findings.lint(make))
    assert _of("duplicate", report) == []
    assert report.constants == {}


def test_buffers_that_every_second_step_writes_are_no_duplicates() -> None:
    class Counted(Masked):
        def __init__(self) -> None:
            super().__init__(lambda: torch.randn(WIDTH, WIDTH))
            self.register_buffer("age", torch.zeros(WIDTH, WIDTH))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls % 2:
                with torch.no_grad():
                    self.age.add_(1)
            return super().forward(x) @ self.age

    def edit(net: Any) -> None:
        net.append(Counted())
        net.append(Counted())

    found = _of("duplicate", findings.lint(_make(edit=edit)))
    assert [finding.modules for finding in found] == [tuple(f"{i}.mask" for i in range(5))]


@pytest.mark.parametrize("aliased", [False, True])
def test_bytes_of_equal_buffers_are_those_that_sharing_frees(aliased: bool) -> None:
    class Held(nn.Module):
        def __init__(self, buffer: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("held", buffer)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.held[0]

    def make() -> Any:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        for _ in range(2):
            row = torch.arange(float(WIDTH))
            same = torch.randn(WIDTH, WIDTH) * 0 + 2  # which only values tell
            net.append(Held(same if aliased else row.expand(WIDTH, WIDTH)))
        if aliased:
            net.append(Held(net[2].held))
        optimizer = torch.optim.SGD(net.parameters())
        return net, optimizer, torch.randn(8, WIDTH), lambda model, batch: model(batch).sum()

    report = apply.with_values(make, findings.lint(make))
    (finding,) = _of("duplicate", report)
    checked = apply.check(make, [finding])
    assert checked.differing == []
    assert checked.peak_before - checked.peak_after == finding.bytes > 0


def test_buffers_that_are_filled_in_place_are_duplicates() -> None:
    def edit(net: Any) -> None:
        for part in net:
            part.register_buffer("filled", torch.full((WIDTH, WIDTH), -1.0).triu_(1))

    def loss(model: Any, batch: Any) -> Any:
        return sum(part(batch[0]).sum() + part.filled.sum() for part in model)

    found = _of("duplicate", findings.lint(_make(edit=edit, loss=loss)))
    assert ("0.filled", "1.filled", "2.filled") in [finding.modules for finding in found]


def test_other_views_of_equal_buffers_stay_as_they_are() -> None:
    class Rotating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.stack((torch.arange(256.0).cos(), torch.arange(256.0).sin()))
            self.register_buffer("cos", table[0])
            self.register_buffer("sin", table[1])
            self.layer = nn.Linear(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x * self.cos + x * self.sin)
            return out

    def make() -> Any:
        net = nn.Sequential(*(Rotating() for _ in range(2)))
        optimizer = torch.optim.SGD(net.parameters())
        return net, optimizer, torch.randn(8, 256), lambda model, batch: model(batch).sum()

    report = findings.lint(make)
    (finding,) = _of("duplicate", report)
    assert (finding.safe, finding.modules, finding.bytes) == (False, (), 2 * 256 * 4)
    net = make()[0]
    apply.apply(net, report.findings)
    assert not torch.equal(net[0].cos, net[0].sin)
    # Real values tell them apart, view by view.
    found = apply.equal_buffers(net, report.constants)
    assert [one.modules for one in found] == [("0.cos", "1.cos"), ("0.sin", "1.sin")]


@pytest.mark.parametrize("registered", [True, False])
def test_buffers_that_the_first_step_makes_are_not_applied(registered: bool) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if registered:
                self.register_buffer("mask", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if getattr(self, "mask", None) is None:
                self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())
            out: torch.Tensor = x @ self.mask
            return out

    def make() -> Any:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Lazy(), nn.LeakyReLU(), Lazy())
        optimizer = torch.optim.SGD(net.parameters())
        return net, optimizer, torch.randn(8, WIDTH), lambda model, batch: model(batch).sum()

    report = apply.with_values(make, findings.lint(make))
    (finding,) = _of("duplicate", report)
    assert (finding.safe, finding.bytes) == (False, SQUARE)
    checked = apply.check(make, report.findings)
    assert checked.differing == []
    assert len(checked.done) == 1  # the activation


def test_numbers_and_buffers_that_are_not_saved_are_compared() -> None:
    """A change must show in either; here the program itself differs from run to run."""

    def make(returned: Any, kept: Any) -> Callable[[], Any]:
        def program() -> Any:
            net = nn.Linear(4, 4)
            net.register_buffer("seen", torch.tensor(float(next(kept))), persistent=False)
            return net, lambda: {"loss": next(returned)}

        return program

    for returned, kept, name in (
        (itertools.count(0.5), itertools.repeat(1.0), "what the step returns"),
        (itertools.repeat(1.0), itertools.count(0.5), "seen afterwards"),
    ):
        with pytest.raises(PlanError, match=f"differ, first in {name}"):
            apply.check(make(returned, kept), [])
    same = apply.check(make(itertools.repeat(1.0), itertools.repeat(1.0)), [])
    assert same.differing == []


def test_equal_tensors_within_a_step() -> None:
    def loss(model: Any, batch: Any) -> Any:
        total = 0.0
        for _ in range(3):
            bias = torch.arange(32.0).outer(torch.arange(float(WIDTH)))
            total = total + (model(batch[0]) * bias).sum()  # each is saved for the backward pass
        return total

    line = f"{__file__}:{loss.__code__.co_firstlineno + 3}"
    found = _of("duplicate", findings.lint(_make(loss=loss)))
    finding = max((f for f in found if f.line == line), key=lambda f: f.bytes)
    assert finding.bytes == 2 * 32 * WIDTH * 4
    assert "3 tensors of equal values" in finding.what


def test_a_list_of_losses_grows() -> None:
    losses: list[Any] = []

    def keeping(model: Any, batch: Any) -> Any:
        loss = model(batch[0]).sum()
        losses.append(loss)
        return loss

    (finding,) = _of("held", findings.lint(_make(loss=keeping)))
    assert finding.line == f"{__file__}:{keeping.__code__.co_firstlineno + 1}"
    assert finding.bytes == 4
    losses.clear()


def test_batches_that_are_fetched_ahead_are_read_and_do_not_grow() -> None:
    rows = 36  # only these batches have so many
    ahead, outputs = [torch.randn(rows, WIDTH)], deque[Any](maxlen=2)

    def fetching(model: Any, _batch: Any) -> Any:
        batch = ahead.pop()
        ahead.append(torch.randn(rows, WIDTH))
        out = model(batch)
        outputs.append(out.detach())
        return out.sum()

    report = findings.lint(_make(loss=fetching))
    assert _of("held", report) == []
    assert rows * WIDTH * 4 not in [finding.bytes for finding in _of("unused", report)]
    ahead.clear()
    outputs.clear()


def test_models_of_one_class_are_told_apart() -> None:
    """A step alone names no model; the second one gets no gradients."""

    def make() -> Any:
        torch.manual_seed(0)
        nets = [Masked(lambda: torch.ones(WIDTH, WIDTH)) for _ in range(2)]
        optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()])
        x = torch.randn(32, WIDTH)

        def step() -> None:
            optimizer.zero_grad()
            (nets[0](x) - nets[1](x).detach()).square().sum().backward()
            optimizer.step()

        return step

    found = _of("no_gradient", findings.lint(make))
    assert len(found) == 2  # of the layer, and of the norm
    assert all(re.match("parameters Masked 2.[ln]", finding.what) for finding in found)


CLASSES = 4096
LOGITS = 32 * CLASSES * 4


def _stepping(step: Callable[[Any, Any], object]) -> Callable[[], Any]:
    """A classifier whose largest tensor is its logits, and the actions between optimizer steps."""

    def make() -> Any:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
        optimizer = torch.optim.SGD(net.parameters())
        batch = torch.randn(32, WIDTH), torch.randint(0, CLASSES, (32,))

        def whole() -> None:
            optimizer.zero_grad()
            step(net, batch)
            optimizer.step()

        return net, whole

    return make


def test_logits_in_a_variable_are_late() -> None:
    def step(net: Any, batch: Any) -> None:
        logits = net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        loss.backward()

    (finding,) = _of("late", findings.lint(_stepping(step)))
    assert finding.line == f"{__file__}:{step.__code__.co_firstlineno + 1}"
    assert finding.bytes == LOGITS
    assert finding.peak_bytes == LOGITS
    assert finding.what.endswith("still alive at the step's peak, though no op needs it any more")


def test_what_the_step_before_left_in_a_variable_is_late() -> None:
    state: dict[str, Any] = {}

    def step(net: Any, batch: Any) -> None:
        logits = net(batch[0])  # in addition to those of the previous step
        loss = nn.functional.cross_entropy(logits, batch[1])
        state["logits"] = logits.detach()
        del logits
        loss.backward()

    (finding,) = _of("late", findings.lint(_stepping(step)))
    assert (finding.bytes, finding.peak_bytes) == (LOGITS, LOGITS)
    state.clear()


def test_what_is_let_go_of_or_needed_is_not_late() -> None:
    state: dict[str, Any] = {}
    steps = iter(range(1000))

    def returned(net: Any, batch: Any) -> None:
        nn.functional.cross_entropy(net(batch[0]), batch[1]).backward()

    def deleted(net: Any, batch: Any) -> None:
        logits = net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        del logits
        loss.backward()

    def measured(net: Any, batch: Any) -> None:
        logits = net(batch[0])
        nn.functional.cross_entropy(logits, batch[1]).backward()
        state["right"] = (logits.argmax(1) == batch[1]).sum()

    def averaged(net: Any, batch: Any) -> None:
        logits = net(batch[0])
        nn.functional.cross_entropy(logits, batch[1]).backward()
        state["mean"] = 0.9 * state.get("mean", 0.0) + 0.1 * logits.detach()

    def seldom(net: Any, batch: Any) -> None:
        logits = net(batch[0])
        nn.functional.cross_entropy(logits, batch[1]).backward()
        if next(steps) % state["every"] == state["at"]:
            state["right"] = (logits.argmax(1) == batch[1]).sum()

    def copied(net: Any, batch: Any) -> None:
        nn.functional.cross_entropy(net(batch[0]), batch[1]).backward()
        if next(steps) % 10 == 0:
            state["slow"] = [parameter.detach().clone() for parameter in net.parameters()]

    def in_turn(net: Any, batch: Any) -> None:
        turns = state.setdefault("turns", [torch.ones(64, WIDTH) * i for i in range(8)])
        labels = batch[1].repeat(2)
        nn.functional.cross_entropy(net(turns[next(steps) % 8]), labels).backward()

    for step in (returned, deleted, measured, averaged, copied, in_turn):
        assert _of("late", findings.lint(_stepping(step))) == [], step.__name__
    for every, at in ((2, 0), (2, 1), (3, 0), (3, 2), (4, 3), (10, 0)):
        state.update(every=every, at=at)
        steps = iter(range(1000))
        assert _of("late", findings.lint(_stepping(seldom))) == [], (every, at)
    state.clear()


@pytest.mark.parametrize(
    "made",
    [
        lambda parameters: torch.optim.Adam(parameters, amsgrad=True, foreach=False),
        lambda parameters: torch.optim.Rprop(parameters, foreach=True),
        torch.optim.Adafactor,
    ],
)
def test_what_an_optimizer_has_in_its_variables_is_not_late(made: Any) -> None:
    def make() -> Any:
        net = nn.Linear(512, 512)
        return net, made(net.parameters()), torch.randn(4, 512), lambda net, x: net(x).sum()

    assert _of("late", findings.lint(make)) == []


def test_what_a_module_around_it_has_is_not_late() -> None:
    def make() -> Any:
        frozen = nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.Sequential(nn.ReLU(), nn.ReLU()))
        net = nn.Sequential(frozen.requires_grad_(False), nn.Linear(CLASSES, 4))
        x = torch.randn(256, WIDTH)
        return net, torch.optim.SGD(net[1].parameters()), x, lambda net, x: net(x).sum()

    assert _of("late", findings.lint(make)) == []


def test_a_step_without_ops_has_nothing() -> None:
    assert findings.lint(lambda: (nn.Linear(4, 4), lambda: None)).findings == []


def test_a_graph_that_is_held_is_counted_whole() -> None:
    metrics: list[Any] = []

    def measuring(model: Any, batch: Any) -> Any:
        metrics.append(model(batch[0]).square().mean())  # no backward pass frees what it saves
        return model(batch[0]).sum()

    held = _of("held", findings.lint(_make(loss=measuring)))
    assert sum(finding.bytes for finding in held) > 3 * 2 * 32 * WIDTH * 4
    metrics.clear()


def test_what_a_step_replaces_or_the_first_one_makes_is_not_held() -> None:
    state: dict[str, Any] = {}

    def averaging(model: Any, batch: Any) -> Any:
        loss = model(batch[0]).sum()
        state.setdefault("scratch", torch.zeros(1024))
        state["mean"] = 0.9 * state.get("mean", 0.0) + 0.1 * loss.detach()
        state["last"] = model(batch[0])
        return loss + state["scratch"].sum()

    assert _of("held", findings.lint(_make(loss=averaging))) == []


def test_an_input_that_nothing_reads() -> None:
    (finding,) = _of("unused", findings.lint(_make()))
    assert finding.bytes == 48 * WIDTH * 4
    assert finding.line.startswith(f"{__file__}:")
    both = _make(loss=lambda model, batch: model(batch[0]).sum() + batch[1].sum())
    assert _of("unused", findings.lint(both)) == []


def test_a_buffer_that_nothing_reads() -> None:
    def edit(net: Any) -> None:
        net[1].register_buffer("table", torch.randn(100, 100))

    found, *_ = _of("unused", findings.lint(_make(edit=edit)))
    assert (found.what, found.bytes) == ("buffer 1.table is never read", 40_000)


def test_parameters_without_a_gradient() -> None:
    def edit(net: Any) -> None:
        net[0].extra = nn.Linear(WIDTH, WIDTH)  # never called
        net[1].fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def loss(model: Any, batch: Any) -> Any:
        with torch.no_grad():
            shift = batch[1] @ model[2].aside
        return model(batch[0]).sum() + shift.sum()

    def both(net: Any) -> None:
        edit(net)
        net[2].aside = nn.Parameter(torch.ones(WIDTH, 4))

    found = _of("no_gradient", findings.lint(_make(edit=both, loss=loss)))
    assert [(f.what, f.bytes) for f in found] == [
        ("parameters 0.extra.weight, 0.extra.bias are never read", SQUARE + WIDTH * 4),
        ("parameter 2.aside is read, yet never gets a gradient", WIDTH * 4 * 4),
    ]


def test_gradients_by_autograd_grad_say_nothing_of_parameters() -> None:
    def make() -> Any:
        net = nn.Linear(WIDTH, WIDTH)

        def step() -> None:
            found = torch.autograd.grad(net(torch.randn(4, WIDTH)).sum(), [*net.parameters()])
            with torch.no_grad():
                for parameter, gradient in zip(net.parameters(), found, strict=True):
                    parameter -= 0.1 * gradient

        return net, step

    report = findings.lint(make)
    assert _of("no_gradient", report) == []
    assert any("unused parameters were not searched for" in remark for remark in report.remarks)


def test_a_clean_program_has_no_findings() -> None:
    def make() -> Any:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.AdamW(net.parameters())
        return net, optimizer, torch.randn(32, WIDTH), lambda model, batch: model(batch).sum()

    report = findings.lint(make)
    assert report.findings == []
    assert report.peak_in_place == report.peak_bytes


def test_torch_is_as_before_afterwards() -> None:
    before = vars(torch.autograd.Function)["apply"], nn.Module.__init__
    findings.lint(_make())
    with pytest.raises(PlanError, match=rf"{__file__}:\d+: a step raised ZeroDivisionError"):
        findings.lint(_make(loss=lambda model, batch: 1 / 0))
    assert before == (vars(torch.autograd.Function)["apply"], nn.Module.__init__)
    saved = nn.Linear(2, 2)(torch.ones(1, 2)).relu()
    assert saved.grad_fn._saved_result is not None  # no hooks are left


def test_torch_func() -> None:
    weight = torch.randn(WIDTH, WIDTH)

    def mapped() -> Any:
        w = torch.randn(WIDTH, WIDTH, requires_grad=True)

        def step() -> None:
            torch.func.vmap(lambda row: torch.relu(row @ w + 1))(torch.randn(5, WIDTH)).sum()

        return step

    assert _of("in_place", findings.lint(mapped)) == []
    with pytest.raises(PlanError, match=r"use torch\.autograd in the step"):
        findings.lint(lambda: lambda: torch.func.grad(lambda w: w.sum())(weight * 1))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_under_hooks_of_ours(reentrant: bool) -> None:
    def make() -> Any:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        batch = torch.randn(32, WIDTH, requires_grad=True)
        return (
            net,
            optimizer,
            batch,
            lambda model, x: checkpoint(model, x, use_reentrant=reentrant).sum(),
        )

    report = findings.lint(make)
    # Code inside a custom function, such as reentrant checkpoints, is not reported.
    assert bool(_of("in_place", report)) != reentrant
    checked = apply.check(make, report.findings)
    assert checked.differing == []
    assert len(checked.done) == (not reentrant)


def test_what_cannot_be_applied_says_so() -> None:
    finding = Finding("in_place", 1, 1, "here", "", "", ("nowhere",), True)
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        apply.apply(nn.ReLU(), [finding])
    finding = Finding("duplicate", 1, 1, "here", "", "", ("ReLU.nothing", "ReLU.more"), True)
    with pytest.raises(ConfigError, match=r"no buffer 'ReLU\.nothing'"):
        apply.apply(nn.ReLU(), [finding])
    with pytest.raises(PlanError, match=r"\(model, step\)"):
        apply.check(lambda: lambda: None, [])
    counter = iter(range(100))
    unlike = _make(loss=lambda model, batch: model(batch[0]).sum() * next(counter))
    with pytest.raises(PlanError, match="with equal seeds differ, first in the loss"):
        apply.check(unlike, [])


def test_random_numbers_of_the_caller_are_left() -> None:
    before = torch.get_rng_state()
    apply.check(_make(), findings.lint(_make()).findings)
    assert torch.equal(before, torch.get_rng_state())
