"""Programs that only run forward have steps, without a line for it."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402

WIDTH = 1024  # a weight of 4 MiB


class Block(torch.nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.inner.in_features:
            raise ValueError("of another width")
        return self.inner(x).relu()


@pytest.fixture
def session() -> Iterator[None]:
    with umem.enable(budget="64MiB", device="soft"):
        yield


def steps_of(act: Callable[[], object]) -> int:
    before = core.steps()
    act()
    return core.steps() - before


def times(n: int, module: Callable[[torch.Tensor], object], width: int = 8) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(n):
            module(torch.ones(2, width))

    return calls


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients_begins_a_step(context: Callable[[], Any]) -> None:
    net = torch.nn.Sequential(Block(), Block())
    with context():
        assert steps_of(times(5, net)) == 4
        assert steps_of(times(5, net)) == 5  # the last one's end is here
    assert all(not part._forward_hooks for part in net.modules())


@pytest.mark.usefixtures("session")
def test_layers_that_are_called_one_by_one_are_one_step() -> None:
    layers = [Block() for _ in range(4)]
    with torch.no_grad():

        def one_pass() -> None:
            for layer in layers:
                layer(torch.ones(2, 8))

        assert [steps_of(one_pass) for _ in range(3)] == [0, 1, 1]


@pytest.mark.usefixtures("session")
def test_calls_with_gradients_begin_none() -> None:
    assert steps_of(times(5, Block())) == 0


@pytest.mark.usefixtures("session")
def test_a_training_step_with_a_teacher_stays_one_and_an_evaluation_has_its_own() -> None:
    student, teacher = Block(), Block()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

    def train() -> None:
        with torch.no_grad():
            times(3, teacher)()
        optimizer.zero_grad()
        student(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    assert [steps_of(train) for _ in range(6)] == [3, 1, 1, 1, 1, 1]  # unknown in the first
    with torch.no_grad():
        assert steps_of(times(20, student)) == 20 - 1 - 2  # as many repeats as a training step has
    assert [steps_of(train) for _ in range(4)] == [1, 1, 1, 1]


@pytest.mark.usefixtures("session")
def test_a_step_that_calls_several_modules_often_without_gradients_stays_one() -> None:
    """A solver of differential equations wraps the model again for each pass."""
    net = Block()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train() -> None:
        with torch.no_grad():
            for calls in (15, 3, 3):
                times(calls, torch.nn.Sequential(net))()
        net(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    train()
    assert [steps_of(train) for _ in range(5)] == [1] * 5


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("samples", [1, 5])
def test_a_sampling_loop_is_no_part_of_the_training_step_after_it(samples: int) -> None:
    net = Block()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        net(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    train()
    for _ in range(6):
        assert [steps_of(train) for _ in range(3)] == [1, 1, 1]
        with torch.no_grad():
            assert steps_of(times(samples, net)) == samples - 1
        assert steps_of(train) == 2  # the last sample's, and its own


@pytest.mark.usefixtures("session")
def test_two_optimizers_of_a_step_one_of_which_follows_a_pass_without_gradients() -> None:
    """A GAN, or a critic with a target: as many steps as without such passes."""
    nets = [Block(), Block()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]

    def both() -> None:
        with torch.no_grad():
            times(1, nets[1])()
        for net, optimizer in zip(nets, optimizers, strict=True):
            net(torch.ones(2, 8)).sum().backward()
            optimizer.step()

    assert [steps_of(both) for _ in range(8)][2:] == [2] * 6


@pytest.mark.usefixtures("session")
def test_a_teacher_that_comes_later_splits_one_step_at_most() -> None:
    student, teacher = Block(), Block()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

    def train(*teachers: Block) -> None:
        with torch.no_grad():
            for net in teachers:
                times(1, net)()
        student(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    for _ in range(4):
        train()
    assert [steps_of(lambda: train(teacher)) for _ in range(5)] == [2, 1, 1, 1, 1]


@pytest.mark.usefixtures("session")
def test_steps_that_the_program_marks_are_not_marked_twice() -> None:
    net = Block()

    def token() -> None:
        times(1, net)()
        umem.step()

    with torch.no_grad():
        assert [steps_of(token) for _ in range(4)] == [1, 1, 1, 1]


class Copied(torch.nn.Module):
    """Copies itself while it runs, as a signal handler that saves the model would."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.copies: list[torch.nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pickled = pickle.dumps(self.layer)
        self.copies = [copy.deepcopy(self), pickle.loads(pickled)]
        return self.layer(x)


def test_a_model_may_be_copied_and_pickled_while_it_runs() -> None:
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        net = Copied()
        with torch.no_grad():
            net(torch.ones(1, 4))
            (copied, _), before = net.copies, core.steps()
            for _ in range(3):
                net(torch.ones(1, 4))
        assert pickle.loads(pickle.dumps(copied))(torch.ones(1, 4)).shape == (1, 4)
        assert core.steps() == before + 3
        del net, copied


@pytest.mark.usefixtures("session")
def test_a_call_that_raises_is_a_call() -> None:
    net = Block()
    with torch.no_grad():
        with pytest.raises(ValueError, match="of another width"):
            net(torch.ones(2, 3))
        assert steps_of(times(3, net)) == 3


class Interrupted(Block):
    interrupt = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.interrupt:
            raise KeyboardInterrupt
        return self.inner(x)


@pytest.mark.usefixtures("session")
def test_steps_go_on_with_the_next_call_of_a_module_that_was_interrupted() -> None:
    net, other = Interrupted(), Block()
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            net(torch.ones(2, 8))
        net.interrupt = False
        net(torch.ones(2, 8))
        assert not net._forward_hooks
        assert steps_of(times(5, other)) == 4


@pytest.mark.usefixtures("session")
def test_steps_go_on_after_a_module_that_was_interrupted_is_gone() -> None:
    net, other = Interrupted(), Block()
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            net(torch.ones(2, 8))
        del net
        gc.collect()  # the exception's frames refer to it
        assert steps_of(times(5, other)) == 4


class Hooked(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_forward_hook(lambda *_: None)
        return super().forward(x)


@pytest.mark.usefixtures("session")
def test_a_module_may_remove_all_its_hooks() -> None:
    net = Block()
    net.register_forward_hook(lambda module, *_: module._forward_hooks.clear())
    with torch.no_grad():
        assert steps_of(times(5, net)) == 4


def test_no_hook_is_left_when_umem_is_off() -> None:
    net = Hooked()
    with (
        umem.enable(budget="64MiB", device="soft"),
        torch.no_grad(),
        pytest.raises(ValueError, match="of another width"),
    ):
        net(torch.ones(2, 4))
    assert len(net._forward_hooks) == 1  # its own


@pytest.mark.usefixtures("session")
def test_a_module_that_adds_hooks_to_itself_raises_its_own_errors() -> None:
    net = Hooked()
    with torch.no_grad():
        with pytest.raises(ValueError, match="of another width"):
            net(torch.ones(2, 4))
        assert steps_of(times(5, net)) == 5  # the failed call was one
    assert len(net._forward_hooks) <= 6 + 1  # its own, and at most the last call's


@pytest.mark.usefixtures("session")
def test_compiled_code_has_steps_where_the_program_calls_it_and_is_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounter

    net, other = Block(), Block()
    for target in (net, lambda x: net(x).sum()):
        counter = CompileCounter()
        compiled = torch.compile(target, backend=counter, fullgraph=True)

        def both(call: Callable[[torch.Tensor], object] = compiled) -> None:
            times(1, call)()
            times(1, other)()

        with torch.no_grad():
            both()
            assert [steps_of(both) for _ in range(4)] == [1, 1, 1, 1]
        assert counter.frame_count == 1


def test_torch_says_nothing_of_hooks_that_it_calls(recwarn: pytest.WarningsRecorder) -> None:
    with umem.enable(budget="64MiB", device="soft"), torch.no_grad():
        torch.compile(Block(), backend="eager")(torch.ones(2, 8))
    assert not [warning for warning in recwarn if "global hooks" in str(warning.message)]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.usefixtures("session")
def test_scripted_modules_have_steps() -> None:
    scripted = torch.jit.script(torch.nn.Linear(8, 8))
    with torch.no_grad():
        assert steps_of(times(4, scripted)) == 3


def test_nothing_is_left_in_torch() -> None:
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before, filters = dict(hooks), list(warnings.filters)
    with umem.enable(budget="64MiB", device="soft"):
        assert len(hooks) == len(before) + 1
        Leaves()(torch.ones(2, 8))
    assert dict(hooks) == before
    assert warnings.filters == filters


class Leaves(Block):
    """Turns umem off while it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        umem.disable()
        return super().forward(x)


def test_a_model_of_four_budgets_streams_by_plan_and_nothing_leaves_by_a_transfer() -> None:
    torch.manual_seed(0)
    with umem.enable(budget="16MiB", device="soft"):
        net = torch.nn.Sequential(*(Block(WIDTH) for _ in range(16)))
        x = torch.ones(1, WIDTH)
        with torch.inference_mode():
            for _ in range(9):
                net(x)
            before = umem.stats()
            for _ in range(12):
                net(x)
            after = umem.stats()
    hits = after.plan_hits - before.plan_hits
    assert hits > 0
    assert after.plan_misses == before.plan_misses
    assert after.bytes_out == before.bytes_out
