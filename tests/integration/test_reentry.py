"""A signal handler, a destructor or a hook may call umem, and an optimizer's methods, at any line.

The call either has its result, or raises a StateError and changes nothing. The training goes on
with the numbers of plain torch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import (  # noqa: E402
    TorchDispatchMode,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_map_only  # noqa: E402

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.base.units import MIB  # noqa: E402
from umem.errors import StateError, UmemError  # noqa: E402
from umem.policies import DeviceProfile, Plan, StepTrace, lowering  # noqa: E402
from umem.session.plan_judge import PlanJudge  # noqa: E402
from umem.session.recording_schedule import RecordingSchedule  # noqa: E402
from umem.session.step_recording import StepRecording  # noqa: E402

UMEM = Path(umem.__file__).parent
OPTIMIZERS = UMEM / "offload" / "optimizer"
WAYS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"update": "host"},
    "overlap": {"update": "host", "overlap": True},
    "share": {"update": "host", "share": 0.5},
    "released": {"release_gradients": True},
    "released, host": {"release_gradients": True, "update": "host"},
}
STEPS = 3


class AtLine:
    """Calls `act` once, at the line with this number of those in `folder`; counts them."""

    def __init__(
        self, act: Callable[..., None] | None, number: int, folder: Path = OPTIMIZERS
    ) -> None:
        self.act, self.number, self.count, self.folder = act, number, 0, str(folder)
        self.where = ""

    def __enter__(self) -> AtLine:
        self._before = sys.gettrace()  # of coverage or a debugger
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, _event: str, _arg: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self.folder) else None

    def _line(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self.number and self.act is not None:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                try:
                    self.act()
                finally:
                    sys.settrace(self._called)
        return self._line


class Training:
    """Three steps of a small net; before or in the second one the optimizer is used again."""

    def __init__(self, way: str | None) -> None:
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=True)
        self.paged = None if way is None else umem.page_optimizer(self.optimizer, **WAYS[way])
        self.checkpoints: list[Any] = []  # of the optimizer and the net, between steps

    def loss(self, i: int) -> Any:
        return self.net(torch.full((8, 256), 0.1 * i + 0.1)).square().mean()

    def checkpoint(self) -> Any:
        file = io.BytesIO()
        torch.save((self.net.state_dict(), self.optimizer.state_dict()), file)
        file.seek(0)
        return values(torch.load(file))

    def run(self, within: AtLine | None = None) -> list[Any]:
        for i in range(STEPS):
            if within is None or i != 1:
                self._step(i)
            else:
                with within:
                    self._step(i)
        return values([*self.net.parameters()])

    def _step(self, i: int) -> None:
        self.loss(i).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def values(tree: Any) -> Any:
    """The tree with bytes in place of tensors: none of them remains alive."""
    return tree_map_only(torch.Tensor, lambda t: t.detach().numpy().tobytes(), tree)


def plain(before: Callable[[Training], object] = lambda _: None) -> tuple[list[Any], list[Any]]:
    """The parameters without umem, and a checkpoint after each step.

    `before` runs before the optimizer's second step.
    """
    training = Training(None)
    checkpoints = []
    for i in range(STEPS):
        training.loss(i).backward()
        if i == 1:
            before(training)
        training.optimizer.step()
        training.optimizer.zero_grad()
        checkpoints.append(training.checkpoint())
    return values([*training.net.parameters()]), checkpoints


def lines(way: str) -> int:
    """The lines of umem's that the second step runs."""
    counter = AtLine(None, 0)
    Training(way).run(counter)
    return counter.count


def numbers(way: str, nightly: bool, most: int = 16) -> list[int]:
    count = lines(way)
    assert count > 20
    return list(range(1, count + 1, 1 if nightly else max(1, count // most)))


@pytest.fixture(autouse=True)
def _small() -> None:
    umem.enable(device="soft", budget="8MiB", policy="lru")


def attempts(
    way: str, nightly: bool, act: Callable[[Training], Any]
) -> Iterator[tuple[str, list[Any], Any]]:
    """Yield where `act` was called, the parameters at the end, and its result; None if refused."""
    for number in numbers(way, nightly):
        training = Training(way)
        found: list[Any] = []

        def call(training: Training = training, found: list[Any] = found) -> None:
            with contextlib.suppress(StateError):
                found.append(act(training))

        within = AtLine(call, number)
        parameters = training.run(within)
        yield f"{way}, {within.where}", parameters, found[0] if found else None
        if training.paged is not None:
            training.paged.remove()


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_is_one_between_steps_or_refused(way: str, nightly: bool) -> None:
    expected, checkpoints = plain()
    wrong = []
    for where, parameters, found in attempts(way, nightly, Training.checkpoint):
        if parameters != expected:
            wrong.append(f"{where}: the training differs")
        if found is not None and found not in checkpoints[:2]:
            wrong.append(f"{where}: the checkpoint is none")
    assert not wrong


def comes_first_or_changes_nothing(
    way: str, nightly: bool, act: Callable[[Training], None]
) -> None:
    """The training is the plain one, or the one with `act` before the second step."""
    expected = [plain()[0], plain(act)[0]]
    wrong = []
    for where, parameters, _ in attempts(way, nightly, act):
        if parameters not in expected:
            wrong.append(where)
    assert not wrong


@pytest.mark.parametrize("way", WAYS)
def test_gradients_may_be_dropped(way: str, nightly: bool) -> None:
    """At any line: the step uses all that it began with, or it has not begun and uses none."""
    comes_first_or_changes_nothing(way, nightly, lambda t: t.optimizer.zero_grad())


@pytest.mark.parametrize("way", WAYS)
def test_a_step_within_a_step_comes_first_or_is_refused(way: str, nightly: bool) -> None:
    comes_first_or_changes_nothing(way, nightly, lambda t: t.optimizer.step())


@pytest.mark.parametrize("way", WAYS)
def test_a_group_may_be_added(way: str, nightly: bool) -> None:
    expected, _ = plain()
    wrong = []

    def add(training: Training) -> None:
        training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(8))]})

    for where, parameters, _ in attempts(way, nightly, add):
        if parameters != expected:
            wrong.append(where)
    assert not wrong


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_is_loaded_or_refused(way: str, nightly: bool) -> None:
    """Loaded before the step or after it, as far as the program can tell."""
    other = Training(None)
    other._step(5)
    saved = other.optimizer.state_dict()

    def load(training: Training) -> bool:
        training.optimizer.load_state_dict(copy.deepcopy(saved))
        return True

    expected, before, training = plain()[0], plain(load)[0], Training(None)
    for i in range(STEPS):
        training._step(i)
        if i == 1:
            load(training)
    after = values([*training.net.parameters()])
    assert before != after != expected
    wrong = []
    for where, parameters, loaded in attempts(way, nightly, load):
        if parameters not in ([before, after] if loaded else [expected]):
            wrong.append((where, loaded))
    assert not wrong


def test_two_threads_train_and_a_third_one_saves() -> None:
    """Each thread has an optimizer of its own; the third one saves both all the time."""
    umem.disable()
    umem.enable(device="soft", budget="32MiB", policy="lru")
    expected, _ = plain()
    trainings = [Training("host"), Training("overlap")]
    for training in trainings:
        training._step(0)  # torch cannot save a state that grows
    found: list[Any] = [None, None]
    saved: list[Any] = []

    def train(i: int) -> None:
        torch.set_num_threads(1)
        try:
            for step in range(1, STEPS):
                trainings[i]._step(step)
            found[i] = values([*trainings[i].net.parameters()])
        finally:
            found[i] = found[i] or "failed"

    def save() -> None:
        while not saved or None in found:
            saved.extend(training.checkpoint()[1] for training in trainings)

    threads = [threading.Thread(target=train, args=(0,)), threading.Thread(target=train, args=(1,)),
               threading.Thread(target=save)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected, expected]
    # As in torch, a step may begin while a state is being copied: each step counter is a whole one.
    counts = {float(np.frombuffer(s["step"], np.float32)[0]) for c in saved
              for s in c["state"].values()}  # fmt: skip
    assert counts <= {1.0, 2.0, 3.0}
    assert saved
    for training in trainings:
        assert training.paged is not None
        training.paged.remove()


def test_two_threads_may_step_one_optimizer() -> None:
    """As in Hogwild: neither waits for the other one's next step."""
    training = Training("host")
    training.loss(0).backward()
    failed: list[BaseException] = []

    def steps() -> None:
        try:
            for _ in range(20):
                training.optimizer.step()
        except BaseException as error:  # noqa: BLE001 - a test
            failed.append(error)

    threads = [threading.Thread(target=steps) for _ in range(2)]
    begin = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert time.process_time() - begin < 20
    assert training.paged is not None
    training.paged.remove()


@pytest.mark.parametrize("way", ["host", "overlap"])
@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
def test_a_step_within_a_checkpoint_is_refused(way: str, method: str) -> None:
    training = Training(way)
    training._step(0)
    saved = training.optimizer.state_dict()
    refused = []

    def step(*_: object) -> None:
        with pytest.raises(StateError, match=r"step\(\) was called in the middle"):
            training.optimizer.step()
        refused.append(method)

    getattr(training.optimizer, f"register_{method}_pre_hook")(step)
    getattr(training.optimizer, method)(*([saved] if method == "load_state_dict" else []))
    assert refused == [method]
    assert training.paged is not None
    training.paged.remove()


@pytest.mark.parametrize("way", ["host", "overlap"])
def test_a_checkpoint_within_remove_is_right_or_refused(way: str) -> None:
    _, checkpoints = plain()
    counter = AtLine(None, 0)
    for number in (0, *range(1, 400, 12)):
        training = Training(way)
        training._step(0)
        found: list[Any] = []

        def save(training: Training = training, found: list[Any] = found) -> None:
            with contextlib.suppress(StateError):
                found.append(training.checkpoint())

        counter = AtLine(save, number)
        assert training.paged is not None
        with counter:
            training.paged.remove()
        assert all(each == checkpoints[0] for each in found), counter.where
        assert training.checkpoint() == checkpoints[0]
    assert counter.count > 30


def off_and_on() -> None:
    umem.disable()
    umem.enable(device="soft", budget="12MiB")


def asleep_and_awake() -> None:
    umem.sleep()
    umem.wake()


def pinned(net: Any) -> None:
    with umem.pin(net[0]):
        pass


FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "disable": lambda _: umem.disable(),
    "off and on": lambda _: off_and_on(),
    "more": lambda _: umem.set_budget("24MiB"),
    "less": lambda _: umem.set_budget("8MiB"),
    "asleep": lambda _: asleep_and_awake(),
    "step": lambda _: umem.step(),
    "evict": lambda net: umem.evict(net),
    "prefetch": lambda net: umem.prefetch(net),
    "pin": pinned,
    "figures": lambda net: (
        umem.stats(),
        str(umem.summary()),
        umem.tensors(),
        umem.where(net[0].weight),
    ),
}


def planned_training(within: AtLine | None = None) -> list[Any]:
    """Five steps with plans, recomputation and updates on the host; `within` is in three."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(5)])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    if within is not None:
        umem.optimize(net, mode="auto")
        act = within.act
        within.act = act and functools.partial(act, net)
    paged = None if within is None else umem.page_optimizer(optimizer, update="host")
    for i in range(5):
        with within if within is not None and i in (1, 2, 3) else contextlib.nullcontext():
            net(torch.full((512, 512), 0.1 * i + 0.1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = values([*net.parameters()])
    if paged is not None:
        paged.remove()
    return found


@functools.cache
def values_and_lines() -> tuple[list[Any], int]:
    """The values of a planned training, and how many lines of umem's it runs."""
    umem.disable()
    expected = planned_training()
    umem.enable(device="soft", budget="12MiB")
    for _ in range(2):  # the first one imports modules
        counter = AtLine(None, 0, UMEM)
        assert planned_training(counter) == expected
    assert counter.count > 5000
    return expected, counter.count


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_function_may_be_called_at_any_line(name: str, nightly: bool, caplog: Any) -> None:
    expected, lines_run = values_and_lines()
    # Each function at lines of its own.
    share = (list(FUNCTIONS).index(name) + 1) * 0.618 % 1
    points = 200 if nightly else 3
    wrong, done = [], 0
    for number in (int((i + share) * lines_run / points) for i in range(points)):
        umem.disable()
        umem.enable(device="soft", budget="12MiB")

        def call(net: torch.nn.Module) -> None:
            nonlocal done
            with contextlib.suppress(UmemError):
                FUNCTIONS[name](net)
                done += 1

        within = AtLine(call, number, UMEM)
        if planned_training(within) != expected:
            wrong.append(within.where)
        assert within.where
    assert not wrong
    assert done > 0
    assert "raised" not in caplog.text  # such as a policy that failed


def test_umem_stays_on_where_an_optimizer_of_the_option_updates() -> None:
    umem.disable()
    expected, _ = plain()
    counter, refused = AtLine(None, 0), 0
    with umem.enable(device="soft", budget="48MiB", policy="lru", optimizer="host"):
        assert Training(None).run(counter) == expected
    for number in range(1, counter.count, counter.count // 40):
        umem.enable(device="soft", budget="48MiB", policy="lru", optimizer="host")
        said: list[str] = []

        def off(said: list[str] = said) -> None:
            try:
                umem.disable()
            except StateError as error:
                said.append(str(error))

        training, within = Training(None), AtLine(off, number)
        assert training.run(within) == expected, within.where
        assert umem.is_enabled() == bool(said), within.where
        if said:
            assert said[0].startswith("umem.disable() was called in the middle of an operation")
            states = [t for s in training.optimizer.state.values() for t in s.values()]
            assert not any(core.owns(t.data_ptr()) for t in states if t.numel() > 1), within.where
            umem.disable()
            refused += 1
    assert refused > 0


@pytest.mark.parametrize("steps", range(3))
def test_nothing_is_recorded_once_umem_is_off(steps: int, monkeypatch: Any) -> None:
    """Turned off by a handler within the end of a step, which then goes on."""
    umem.disable()
    umem.enable(device="soft", budget="12MiB")
    used, start = RecordingSchedule.step_used, StepRecording.start
    started: list[bool] = []
    seen = 0

    def step_used(self: RecordingSchedule) -> None:
        nonlocal seen
        used(self)
        seen += 1
        if seen > steps:
            umem.disable()

    def starts(self: StepRecording) -> None:
        started.append(core.running())
        start(self)

    monkeypatch.setattr(RecordingSchedule, "step_used", step_used)
    monkeypatch.setattr(StepRecording, "start", starts)
    training = Training(None)
    for i in range(steps + 2):
        training._step(i)
    assert not umem.is_enabled()
    assert all(started)


class Doing:
    """A policy that does something while it is asked, and moves nothing."""

    name = "doing"

    def __init__(self, act: Callable[[], object]) -> None:
        self.act, self.asked = act, 0

    def plan(self, trace: StepTrace, _device: DeviceProfile, _budget: int) -> Plan:
        self.asked += 1
        self.act()
        return Plan(trace)


def _losses(policy: Doing | str | None, steps: int = 6, budget: str = "24MiB") -> list[float]:
    umem.disable()
    if policy is not None:
        umem.enable(device="soft", budget=budget, policy=policy)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        loss = net(torch.ones(512, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_policy_that_turns_umem_off_and_fails_is_not_replaced(caplog: Any) -> None:
    def leave() -> None:
        umem.disable()
        raise RuntimeError("too late")

    policy = Doing(leave)
    with caplog.at_level("WARNING", "umem"):
        assert _losses(policy) == _losses(None)
    assert policy.asked == 1
    assert "falling back" not in caplog.text


def test_a_step_that_a_policy_ends_while_it_plans_is_part_of_the_next() -> None:
    policy = Doing(umem.step)
    found = _losses(policy)
    assert policy.asked >= 1
    assert umem.is_enabled()
    assert found == _losses(None)


def test_a_plan_for_a_budget_that_changed_meanwhile_is_dropped() -> None:
    policy = Doing(lambda: umem.set_budget(f"{24 + 4 * (policy.asked < 2)}MiB"))
    found = _losses(policy, steps=12)
    assert policy.asked >= 2  # for the new one
    assert umem.stats().budget_bytes == 24 * MIB
    umem.disable()
    assert found == _losses(None, steps=12)


def test_a_budget_that_changes_while_a_plan_is_replaced_drops_the_plan(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    real, calls = lowering.lower, itertools.count()

    def lower(*args: Any) -> Any:
        made = real(*args)
        if next(calls) == 1:  # for the trial of the first plan's second choice
            umem.set_budget("10MiB")
        return made

    monkeypatch.setattr(lowering, "lower", lower)
    with caplog.at_level("WARNING", "umem"):
        found = _losses("auto", steps=24, budget="8MiB")
    assert next(calls) > 2  # it planned again
    assert umem.stats().budget_bytes == 10 * MIB
    assert "falling back" not in caplog.text
    umem.disable()
    assert found == _losses(None, steps=24)


def test_the_python_observer_stays_while_an_operator_runs() -> None:
    umem.disable()
    with torch.library._scoped_library("umem_tests", "FRAGMENT") as library:
        library.define("leaves(Tensor x) -> Tensor")

        def leaves(x: torch.Tensor) -> torch.Tensor:
            umem.disable()
            return x.clone()

        library.impl("leaves", leaves, "CompositeExplicitAutograd")
        umem.enable(device="soft", budget="12MiB", observer="python")
        with pytest.raises(StateError, match="cannot be removed inside an operator"):
            torch.ops.umem_tests.leaves(torch.ones(2))
        assert umem.is_enabled()
        weight = torch.nn.Parameter(torch.ones(2))
        weight.sum().backward()
        torch.optim.SGD([weight]).step()
        assert umem.stats().steps == 1  # all parts that see the program are there
        umem.disable()
        assert not umem.is_enabled()
        assert torch._C._len_torch_dispatch_stack() == 0


class Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_python_observer_takes_no_other_mode_and_leaves_on_its_thread_only() -> None:
    umem.disable()
    umem.enable(device="soft", budget="12MiB", observer="python")
    with Mode() as mode:
        with pytest.raises(StateError, match="or another dispatch mode"):
            umem.disable()
        assert _get_current_dispatch_mode() is mode
    with ThreadPoolExecutor(1) as other, pytest.raises(StateError, match="nor on another thread"):
        other.submit(umem.disable).result()
    assert umem.is_enabled()
    umem.disable()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_planning_goes_on_where_a_handler_sets_the_budget(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between a check of the planner's and what follows it, in each step that plans."""
    plainly, budgets = PlanJudge.compares, itertools.cycle(("13MiB", "12MiB"))
    calls = []

    def interrupted(self: PlanJudge, plan: int) -> bool:
        found = plainly(self, plan)
        calls.append(plan)
        umem.set_budget(next(budgets))
        return found

    umem.disable()
    with umem.enable(device="soft", budget="12MiB"):
        training = Training(None)
        monkeypatch.setattr(PlanJudge, "compares", interrupted)
        for i in range(14):
            training._step(i)
        del training
        gc.collect()
    assert calls
    assert "raised" not in caplog.text
