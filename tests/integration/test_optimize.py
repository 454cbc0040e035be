"""umem.optimize: live models, with umem on and off, whose steps keep less and compute the same."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import os
import pickle
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.recompute import gradients, same  # noqa: E402
from support.recompute_nets import Convolutional, transformer  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import umem  # noqa: E402
from umem.capture.recording import Recording  # noqa: E402
from umem.errors import ConfigError, NotSupportedError, StateError  # noqa: E402
from umem.recompute.executor.choose import LIVE_MODES  # noqa: E402
from umem.recompute.executor.forward import Unplanned  # noqa: E402
from umem.recompute.executor.module import optimized  # noqa: E402
from umem.recompute.executor.recorder import StepRecorder  # noqa: E402
from umem.recompute.optimize import report  # noqa: E402
from umem.recompute.planner.plan import MODES  # noqa: E402
from umem.trace.schema import Event, Op  # noqa: E402

MIB = 1 << 20


def cnn() -> tuple[nn.Module, Any]:
    return Convolutional(16), torch.randn(8, 3, 64, 64)


def attention() -> tuple[nn.Module, Any]:
    return transformer(128, 2), torch.randn(8, 128, 128)


def step(net: nn.Module, x: Any, seed: int = 0) -> list[Any]:
    torch.manual_seed(seed)
    net.zero_grad()
    net(x).square().mean().backward()
    return [*gradients(net), *(buffer.clone() for buffer in net.buffers()), torch.get_rng_state()]


def agree(net: nn.Module, plain: nn.Module, x: Any, steps: int = 2) -> None:
    for i in range(steps):
        assert same(step(plain, x, i), step(net, x, i))


@pytest.mark.parametrize("make", [cnn, attention])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "swap"])
def test_gradients_are_the_same_in_every_mode(
    make: Callable[[], tuple[nn.Module, Any]], mode: str
) -> None:
    net, x = make()
    plain = copy.deepcopy(net)
    assert umem.optimize(net, mode=mode, budget="50%") is net
    agree(net, plain, x)
    found = report(net)
    assert found.plans == 1
    assert found.why_not == ""
    assert found.dropped_bytes > 0


@pytest.mark.parametrize("mode", ["auto", "per_block", "memory"])
def test_the_peak_falls_as_expected(mode: str) -> None:
    net, x = transformer(256, 3), torch.randn(8, 128, 256)
    with umem.enable(budget="512MiB", device="soft"):
        net, x = copy.deepcopy(net), x.clone()
        peaks = []
        for optimized in (False, True):
            if optimized:
                umem.optimize(net, mode=mode, budget="50%")
            for _ in range(2):
                gc.collect()
                umem.reset_peak_stats()
                net.zero_grad()
                net(x).square().mean().backward()
            peaks.append(umem.stats().peak_live_bytes)
        expected = report(net).expected
        assert expected is not None
        saved = expected.peak_bytes - expected.peak_with
        assert saved > 10 * MIB
        assert peaks[0] - peaks[1] == pytest.approx(saved, rel=0.15)
        del net, x


def test_deoptimize_and_what_may_not_be_optimized() -> None:
    net, x = cnn()
    plain = copy.deepcopy(net)
    umem.optimize(net, budget="50%")
    with pytest.raises(StateError, match="optimized already"):
        umem.optimize(net)
    assert umem.deoptimize(net) is net
    assert optimized(net) is None
    assert "forward" not in vars(net)
    agree(net, plain, x)
    umem.deoptimize(net)
    with pytest.raises(StateError, match="not optimized"):
        report(net)
    with pytest.raises(ConfigError, match=r"did you mean speed\?"):
        umem.optimize(net, mode="sped")
    with pytest.raises(ConfigError, match="budget='7 pounds'"):
        umem.optimize(net, budget="7 pounds")
    with pytest.raises(ConfigError, match=r"allowed: a torch\.nn\.Module"):
        umem.optimize(len)  # type: ignore[type-var]
    with pytest.raises(NotSupportedError, match="DataParallel"):
        umem.optimize(nn.DataParallel(net))
    umem.optimize(net)
    with pytest.raises(ConfigError, match=r"no default budget .*; allowed: budget="):
        net(x)


def test_a_forward_of_the_models_own_is_put_back() -> None:
    net = nn.Linear(4, 4)
    net.forward = own = lambda x: x * 2
    umem.optimize(net, budget="50%")
    assert torch.equal(net(torch.ones(4)), torch.full((4,), 2.0))
    umem.deoptimize(net)
    assert net.forward is own


def test_no_gradients_and_evaluation_are_left_alone() -> None:
    net, x = cnn()
    umem.optimize(net, mode="speed")
    with torch.no_grad():
        net(x)
    net.eval()
    net(x).sum().backward()
    assert report(net).plans == 0


def test_new_shapes_get_a_plan_and_known_ones_do_not() -> None:
    net, _ = cnn()
    x = torch.randn(16, 3, 64, 64)
    plain = copy.deepcopy(net)
    umem.optimize(net, mode="speed")
    for batch in (16, 8, 16, 8):
        agree(net, plain, x[:batch], steps=1)
        assert report(net).dropped_bytes > 0
    assert report(net).plans == 2


def test_copies_and_pickles_are_the_plain_model() -> None:
    net, x = cnn()
    plain = copy.deepcopy(net)
    umem.optimize(net, mode="speed")
    step(net, x)
    twin = copy.deepcopy(net)
    again = pickle.loads(pickle.dumps(net))
    for other in (twin, again):
        assert optimized(other) is None
        umem.optimize(other, mode="speed")
        plain.load_state_dict(net.state_dict())
        agree(other, plain, x)
        assert report(other).dropped > 0
    assert list(net.state_dict()) == list(plain.state_dict())


def test_a_step_is_planned_once_the_program_has_run_it() -> None:
    net, x = cnn()
    umem.optimize(net, mode="speed")
    outs = [net(x) for _ in range(3)]  # no backward pass yet, so nothing to plan from
    assert report(net).plans == 0
    for out in outs:
        out.sum().backward()
    agree(net, copy.deepcopy(net), x)
    assert report(net).plans == 1
    assert report(net).why_not == ""


def test_without_umem_the_first_step_drops_what_is_cheap() -> None:
    net, x = cnn()
    plain = copy.deepcopy(net)
    umem.optimize(net, budget="50%")
    agree(net, plain, x, steps=1)
    assert report(net).plans == 0
    assert report(net).dropped_bytes > 0
    assert "recorded" in report(net).why_not


def sizes(event: Event, found: Recording) -> tuple[Any, ...]:
    """The event, with the bytes of blocks in place of their numbers."""
    bytes_of = {i: block.bytes for i, block in found.blocks.items()}
    if isinstance(event, Op):
        return event.name, [bytes_of[i] for i in event.reads], [bytes_of[i] for i in event.writes]
    return type(event).__name__, bytes_of.get(getattr(event, "id", -1))


def test_the_record_of_a_step_is_the_one_of_a_plain_step() -> None:
    """It does not tell if cheap results are dropped in the recorded step."""
    recorded = []
    for cheap in (False, True):
        net, x = cnn()
        recorder = StepRecorder(net, (x,), {})
        out, tally = recorder.run(lambda net=net, x=x: net(x), Unplanned(cheap=cheap))  # type: ignore[misc]
        assert (tally.dropped > 0) is cheap
        out.square().mean().backward()
        del out
        found = recorder.finish()
        assert recorder.failure == ""
        recorded.append([sizes(event, found) for event in found.events])
    ops = [[event for event in events if event[0] not in ("Alloc", "Free")] for events in recorded]
    assert ops[0] == ops[1]
    for kind in ("Alloc", "Free"):
        counts = [Counter(event for event in events if event[0] == kind) for events in recorded]
        assert counts[0] == counts[1]


class Branching(nn.Module):
    """Another op in each second call, which its inputs' shapes do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for i, layer in enumerate(self.layers):
            x = nn.functional.gelu(layer(x))
            if i == 1 and self.calls % 2:
                x = x.sin()
        self.calls += 1
        return x


def test_a_model_that_changes_all_the_time_is_given_up(caplog: Any) -> None:
    net, x = Branching(), torch.randn(4096, 256)
    plain = copy.deepcopy(net)
    umem.optimize(net, mode="speed")
    with caplog.at_level(logging.WARNING, "umem"):
        agree(net, plain, x, steps=8)
    assert [record.getMessage() for record in caplog.records] == [
        "Branching keeps all activations: its forward passes differ: op 6 is aten.sin.default, "
        "planned was aten.t.default"
    ]
    assert "differ" in report(net).why_not


class EverySecond(nn.Module):
    """A step calls it twice, and the second call runs another op, as weights cast once do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.first = True

    def forward(self, x: Any) -> Any:
        for i, layer in enumerate(self.layers):
            x = nn.functional.gelu(layer(x))
            if i == 1 and not self.first:
                x = x.sin()
        return x

    def step(self, x: Any) -> list[Any]:
        self.zero_grad()
        self.first = True
        one = self(x)
        self.first = False
        (one * self(x)).mean().backward()
        return gradients(self)


def test_a_second_call_of_a_step_that_differs_leaves_the_first_its_plan() -> None:
    net, x = EverySecond(), torch.randn(4096, 256)
    plain = copy.deepcopy(net)
    umem.optimize(net, mode="speed")
    dropped = []
    for _ in range(8):
        assert same(plain.step(x), net.step(x))
        found = report(net)
        assert "differ" not in found.why_not
        dropped.append(found.dropped)
    assert found.plans == 1
    assert min(dropped[1:]) > 0


def test_the_report_is_of_the_last_pass() -> None:
    net = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
    large, small = torch.randn(4096, 256), torch.randn(4, 256)
    umem.optimize(net, mode="speed")
    for x in (large, large, small, small):
        step(net, x)
    found = report(net)
    assert (found.dropped, found.dropped_bytes) == (0, 0)
    assert "no tensor needs to be dropped" in found.why_not
    step(net, large)
    found = report(net)
    assert found.dropped > 0
    assert found.expected is not None
    with torch.autograd.graph.save_on_cpu():
        step(net, large)
    found = report(net)
    assert (found.dropped, found.dropped_bytes, found.expected) == (0, 0, None)
    assert "save_on_cpu" in found.why_not


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x: Any) -> Any:
        x = nn.functional.gelu(self.layer(x))
        return x[x > 0].exp()


def test_sizes_may_depend_on_data() -> None:
    net, x = Sized(), torch.randn(8192, 256)  # half of it: above the least size that is dropped
    plain = copy.deepcopy(net)
    umem.optimize(net, mode="speed")
    agree(net, plain, x, steps=4)
    assert report(net).dropped > 0


def test_inside_of_a_checkpoint_or_hooks_it_is_left_alone(caplog: Any) -> None:
    net, x = cnn()
    plain = copy.deepcopy(net)
    umem.optimize(net, mode="speed")

    def both(run: Callable[[nn.Module], Any]) -> None:
        results = []
        for model in (plain, net):
            torch.manual_seed(1)
            model.zero_grad()
            run(model).sum().backward()
            results.append(gradients(model))
        assert same(*results)

    def in_hooks(model: nn.Module) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    with caplog.at_level(logging.WARNING, "umem"):
        both(lambda model: checkpoint(model, x, use_reentrant=False))
        both(lambda model: checkpoint(model, x.requires_grad_(), use_reentrant=True))
        both(in_hooks)
    assert len(caplog.records) == 1
    assert "hooks of saved tensors are active" in caplog.records[0].getMessage()
    assert report(net).plans == 0


def test_new_inputs_run_without_recomputation_once_umem_is_off() -> None:
    with umem.enable(budget="64MiB", device="soft"):
        net, x = cnn()
        plain = copy.deepcopy(net)
        umem.optimize(net, mode="auto")
        agree(net, plain, x, steps=3)
    agree(net, plain, x, steps=18)  # looks again at some calls
    agree(net, plain, x[:4])
    assert "umem is off" in report(net).why_not


def test_under_functional_transforms_it_is_left_alone() -> None:
    net = nn.Linear(8, 8)
    umem.optimize(net, mode="speed")
    x = torch.randn(4, 8)
    jacobian = torch.func.vmap(torch.func.grad(lambda row: net(row).sum()))(x)
    assert torch.allclose(jacobian, net.weight.sum(0).expand(4, 8))
    assert report(net).plans == 0


def test_the_plan_is_made_again_when_the_optimizers_state_is_there() -> None:
    with umem.enable(budget="512MiB", device="soft"):
        net, x = transformer(256, 2), torch.randn(16, 128, 256)
        umem.optimize(net, mode="recompute", budget="100%")
        for _ in range(2):
            step(net, x)
        expected = report(net).expected
        assert expected is not None
        umem.deoptimize(net).zero_grad()
        umem.optimize(net, mode="recompute", budget=expected.peak_bytes - 8 * MIB)
        optimizer = torch.optim.Adam(net.parameters())
        dropped = []
        for i in range(4):
            step(net, x)
            if i:  # the first two calls belong to one step of the optimizer
                optimizer.step()
            dropped.append(report(net).dropped_bytes)
        assert report(net).plans == 2
        assert dropped[0] == 0  # umem is on: the recorded step drops nothing
        assert 0 < dropped[1] < dropped[2] == dropped[3]
        del net, x, optimizer


@pytest.mark.filterwarnings("default")  # torch's own, while it compiles
def test_a_compiled_part_runs_compiled_and_the_rest_is_planned() -> None:
    net, x = cnn()
    plain = copy.deepcopy(net)
    runs = []

    def backend(graph: Any, _examples: Any) -> Any:
        return lambda *given: (runs.append(1), graph(*given))[1]

    net.blocks[0] = torch.compile(net.blocks[0], backend=backend)
    umem.optimize(net, mode="speed")
    agree(net, plain, x, steps=4)
    assert len(runs) == 4
    assert report(net).dropped > 0


@pytest.mark.filterwarnings("default")  # torch's own, while it compiles
def test_a_part_whose_backward_pass_is_compiled_too() -> None:
    """Its node releases what it has saved before it ends."""
    net, x = cnn()
    plain = copy.deepcopy(net)
    net.blocks[0].compile(backend="aot_eager")
    umem.optimize(net, mode="speed")
    agree(net, plain, x, steps=4)
    assert report(net).why_not == ""
    assert report(net).dropped > 0
    torch._dynamo.reset()


@pytest.mark.parametrize("respect", [None, True])
def test_a_selective_checkpoint_inside(respect: bool | None) -> None:
    """Since torch 2.14 it looks for hooks of the program, which umem's are not."""
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )  # fmt: skip

    options: dict[str, Any] = {} if respect is None else {"respect_saved_tensors_hooks": respect}
    if options and "respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters:
        pytest.skip("this torch has no such option")

    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (
                nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = partial(
                create_selective_checkpoint_contexts,
                lambda _ctx, op, *_args, **_named: (
                    CheckpointPolicy.MUST_SAVE
                    if op == torch.ops.aten.tanh.default
                    else CheckpointPolicy.PREFER_RECOMPUTE
                ),
            )
            x = checkpoint(self.first, x, use_reentrant=False, context_fn=kept, **options)
            out: torch.Tensor = self.second(torch.relu(x))
            return out

    net = Selective()
    plain = copy.deepcopy(net)
    umem.optimize(net, mode="memory")
    agree(net, plain, torch.randn(256, 64), steps=4)
    assert "not live" not in report(net).why_not


PROGRAM = """
import torch
from support.recompute_nets import transformer
from umem.recompute.executor.module import optimized
net, x = transformer(128, 2), torch.randn(8, 128, 128)
for _ in range(3):
    net(x).sum().backward()
print("dropped", optimized(net).report.dropped_bytes > 0)
"""


def test_umem_run_recompute(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "umem", "run", "--budget", "256MiB", "--device", "soft",
               "--recompute", "speed", str(script)]  # fmt: skip
    tests = str(Path(__file__).parent.parent)
    paths = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "dropped True\n", done.stderr


def test_the_option_optimizes_models_that_are_trained() -> None:
    net, x = attention()
    head = nn.Linear(128, 4)
    plain = copy.deepcopy(net)
    with umem.enable(budget="256MiB", device="soft", recompute="speed"):
        for i in range(3):
            assert same(step(plain, x, i)[:-1], step(net, x, i)[:-1])
        head(x).sum().backward()
        assert optimized(net) is not None
        assert report(net).dropped > 0
        assert all(optimized(part) is None for part in net.children())
    assert optimized(net) is None


def test_the_option_leaves_compiled_models_alone(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    part = nn.Linear(64, 64)
    models = [
        torch.compile(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), fullgraph=True, backend="eager"),
        nn.Sequential(torch.compile(part, fullgraph=True, backend="eager"), nn.Tanh()),
    ]
    with umem.enable(budget="64MiB", device="soft", recompute="auto"):
        for model in models:
            for _ in range(4):
                model(torch.ones(4, 64)).sum().backward()
            model.zero_grad()
    torch._dynamo.reset()
    said = [record.getMessage() for record in caplog.records if record.name == "umem"]
    assert len(said) == 1
    assert said[0].startswith(
        "OptimizedModule keeps all activations: OptimizedModule runs compiled"
    )


def test_the_options_choices_are_the_modes() -> None:
    from umem.config.options import BY_NAME

    assert BY_NAME["recompute"].allowed == ", ".join(("off", *LIVE_MODES))


class Tangled(nn.Module):
    """Has a layer, and does with its input what the test says."""

    def __init__(self, run: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 8192)  # an activation of 2 MiB, the least that is dropped
        self.steps = run

    def forward(self, x: Any) -> Any:
        return self.steps(self.layer, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_while_torch_traces_it_the_model_is_left_alone(caplog: Any) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    expected = net(x)
    umem.optimize(net, mode="speed")

    def without_hooks(given: Any) -> Any:
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            return net(given)

    with caplog.at_level(logging.WARNING, "umem"):
        assert torch.equal(without_hooks(x), expected)
        assert report(net).why_not == "hooks of saved tensors are disabled"
        assert torch.equal(make_fx(net)(x)(x), expected)
        assert report(net).why_not == "it is traced by torch.fx"
        assert torch.equal(torch.jit.trace(net, x)(x), expected)
        assert report(net).why_not == "it is traced by torch.jit"
    assert len(caplog.records) == 3
    assert report(net).plans == 0


def test_more_shapes_than_plans_use_the_plan_of_the_largest(caplog: Any) -> None:
    net = nn.Sequential(*(nn.Tanh() for _ in range(3)), nn.Linear(64, 64))
    plain = copy.deepcopy(net)
    umem.optimize(net, mode="speed")
    with caplog.at_level(logging.WARNING, "umem"):
        for rows in range(1, 21):
            agree(net, plain, torch.randn(rows, 64), steps=1)
    words = "inputs have more than 16 different shapes: further ones use the plan of the largest"
    assert caplog.text.count(words) == 1


def test_a_device_for_the_plan_is_named_as_in_umem_plan() -> None:
    net, x = cnn()
    plain = copy.deepcopy(net)
    with pytest.raises(ConfigError, match="did you mean rtx4090-pcie4"):
        umem.optimize(net, mode="speed", device="rtx4090")
    assert optimized(net) is None
    umem.optimize(net, mode="speed", device="rtx4090-pcie4")
    agree(net, plain, x)
    assert report(net).plans == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compiled_code_is_refused() -> None:
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    with pytest.raises(NotSupportedError, match="OptimizedModule runs compiled code"):
        umem.optimize(compiled)
    scripted: Any = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(NotSupportedError, match="optimize a module in eager mode"):
        umem.optimize(scripted)


def test_numbers_in_the_inputs_need_no_plan_of_their_own_but_words_do() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Any, scale: float, how: str) -> Any:
            x = self.layer(x).tanh()
            return (x * scale).exp() if how == "exp" else x * scale

    net, x = Scaled(), torch.randn(8192, 64)
    plain = copy.deepcopy(net)
    umem.optimize(net, mode="speed")
    for scale, how, plans in ((1.0, "exp", 0), (2.0, "exp", 1), (3.0, "sum", 1), (4.0, "sum", 2)):
        for model in (plain, net):
            model.zero_grad()
            model(x, scale, how).sum().backward()
        assert same(gradients(plain), gradients(net))
        assert report(net).plans == plans
        assert report(net).dropped > 0


def _sparse(layer: nn.Module, x: Any) -> Any:
    graph = torch.eye(64).to_sparse().requires_grad_()
    return torch.sparse.mm(graph, layer(x).tanh()).exp()


def _written_sparse(layer: nn.Module, x: Any) -> Any:
    graph = torch.eye(64).to_sparse()
    graph.mul_(2)
    return torch.sparse.mm(graph, layer(x).tanh()).exp()


def _without_data(layer: nn.Module, x: Any) -> Any:
    form = torch.empty(8192, 64, device="meta").t().contiguous()
    return layer(x).tanh().view(form.shape).exp()


def _complex(layer: nn.Module, x: Any) -> Any:
    h = layer(x).tanh()
    pairs = torch.view_as_complex(h.view(64, 4096, 2))
    return (pairs * pairs).abs().exp() + h.sum()


@pytest.mark.parametrize("run", [_sparse, _written_sparse, _without_data, _complex])
def test_tensors_without_a_plain_storage_change_no_gradient(run: Callable[..., Any]) -> None:
    net, x = Tangled(run), torch.randn(64, 64)
    plain = copy.deepcopy(net)
    umem.optimize(net, mode="memory")
    agree(net, plain, x, steps=4)
    assert report(net).plans == 1
    assert report(net).dropped > 0


def test_what_came_before_the_model_is_no_part_of_its_step() -> None:
    before, (net, x) = nn.Conv2d(3, 3, 1), cnn()
    plain = copy.deepcopy(net)
    umem.optimize(net, budget="50%")
    for seed in range(3):
        found = []
        for model in (plain, net):
            torch.manual_seed(seed)
            before.zero_grad()
            model.zero_grad()
            model(before(x)).square().mean().backward()
            found.append([*gradients(before), *gradients(model)])
        assert same(*found)
    assert report(net).plans == 1
    assert report(net).dropped > 0


def test_a_plan_that_umem_off_leaves_without_a_budget_is_given_up() -> None:
    with umem.enable(budget="64MiB", device="soft"):
        net, x = cnn()
        plain = copy.deepcopy(net)
        umem.optimize(net, mode="auto")
        agree(net, plain, x, steps=1)  # recorded
    agree(net, plain, x, steps=3)
    assert report(net).plans == 0
    assert "no default budget" in report(net).why_not


def test_a_class_gets_its_forward_back_unless_the_program_has_replaced_it() -> None:
    class Inherits(nn.Linear):
        pass

    class Replaced(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x)

    net = umem.optimize(Inherits(2, 2), budget="50%")
    assert "forward" in vars(Inherits)
    umem.deoptimize(net)
    assert "forward" not in vars(Inherits)
    other = umem.optimize(Replaced(2, 2), budget="50%")
    Replaced.forward = mine = lambda self, x: x * 2  # type: ignore[assignment,method-assign]
    umem.deoptimize(other)
    assert Replaced.forward is mine
    assert torch.equal(other(torch.ones(2)), torch.full((2,), 2.0))


def test_a_model_with_a_forward_of_its_own_is_copied_without_umem() -> None:
    net = nn.Linear(4, 4)
    net.forward = torch.nn.functional.relu
    umem.optimize(net, budget="50%")
    copied = pickle.loads(pickle.dumps(net))
    assert torch.equal(copied(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))
    assert optimized(copied) is None


def test_a_model_that_is_gone_before_its_backward_pass_leaves_its_gradients() -> None:
    net, x = cnn()
    plain, parameters = copy.deepcopy(net), list(net.parameters())
    umem.optimize(net, budget="50%")
    torch.manual_seed(0)
    loss = net(x).square().mean()
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    loss.backward()
    torch.manual_seed(0)
    plain(x).square().mean().backward()
    assert same([p.grad for p in parameters], gradients(plain))


def test_the_option_leaves_what_is_not_trained_or_is_optimized_already() -> None:
    with umem.enable(budget="64MiB", device="soft", recompute="speed"):
        net, x = cnn()
        with torch.no_grad():
            net(x)
        assert optimized(net) is None
        part = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        umem.optimize(part, budget="50%")
        whole = nn.Sequential(part, nn.Linear(8, 8))
        whole(torch.ones(2, 8)).sum().backward()
        assert optimized(whole) is None
        assert optimized(part) is not None
        net(x).sum().backward()
        assert optimized(net) is not None
