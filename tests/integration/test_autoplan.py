"""Steps are recorded, planned and executed, regardless of the program's actions between them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.layers import Scale, Step, training  # noqa: E402

import umem  # noqa: E402
from umem.base.device_profiles import DeviceProfile  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.policies.base import CandidateView, Fetch, Move, Plan  # noqa: E402
from umem.session import recording_schedule  # noqa: E402
from umem.trace.step_trace import Kind, StepTrace  # noqa: E402

LAYERS, WIDTH = 6, 1024  # 4 MiB a weight
BUDGET = "24MiB"


class Tiny:
    """Evicts each weight after its first use, and fetches it two ops before the next."""

    name = "tiny"

    def __init__(self) -> None:
        self.planned: list[tuple[int, int]] = []  # ops and budget of each

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:
        assert device.bytes_per_us_in > 0
        self.planned.append((trace.n_ops, budget))
        evict, fetch = [], []
        for tensor in range(trace.n_tensors):
            uses = trace.uses(tensor)
            if trace.large[tensor] and trace.kind[tensor] == Kind.PERSISTENT and len(uses) > 1:
                evict.append(Move(int(uses[0]), tensor))
                fetch.append(Fetch(int(uses[1]) - 2, int(uses[1]), tensor))
        return Plan(trace, evict=tuple(evict), fetch=tuple(fetch))


@pytest.fixture
def tiny() -> Iterator[Tiny]:
    yield Tiny()
    umem.disable()


def losses(policy: Any, work: Callable[[torch.nn.Module, Step], list[float]]) -> list[float]:
    with umem.enable(budget=BUDGET, device="soft", policy=policy):
        net, step = training(LAYERS, WIDTH)
        return work(net, step)


def went_by() -> int:
    """The number of the plan that the last step followed; 0: none."""
    planned = core.current_options().policy == "planned"
    return core.plan_status()["complete"] if planned else 0


def plain(_net: torch.nn.Module, step: Step) -> list[float]:
    return [step(64) for _ in range(8)]


def test_the_second_step_is_planned_and_the_next_go_by_the_plan(tiny: Tiny) -> None:
    status = []

    def work(net: torch.nn.Module, step: Step) -> list[float]:
        del net
        result = []
        for _ in range(8):
            result.append(step(64))
            status.append(core.plan_status())
        return result

    planned = losses(tiny, work)
    stats = umem.stats()
    assert planned == losses("lru", plain)  # to the last bit
    assert tiny.planned[0][1] == 24 << 20
    assert len(tiny.planned) == 1
    assert [s["complete"] for s in status] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert status[-1]["misses"] == 0
    assert stats.plan_hits > 0
    assert stats.prefetches > 0


def test_a_last_partial_batch(tiny: Tiny) -> None:
    def work(_net: torch.nn.Module, step: Step) -> list[float]:
        return [step(rows) for _ in range(3) for rows in (1024, 1024, 1024, 512)]

    assert losses(tiny, work) == losses("lru", work)
    assert len(tiny.planned) >= 2


def test_an_evaluation_between_epochs(tiny: Tiny) -> None:
    complete = []

    def work(net: torch.nn.Module, step: Step) -> list[float]:
        result = []
        for _ in range(3):
            for _ in range(5):
                result.append(step(64))
                complete.append(went_by())
            with torch.no_grad():
                result.append(float(net(torch.ones(64, WIDTH)).sum().item()))
        return result

    assert losses(tiny, work) == losses("lru", work)
    assert sum(c > 0 for c in complete[:15]) >= 3 + 3 + 3  # it continues after each


def test_two_shapes_by_turns_have_a_plan_each(tiny: Tiny) -> None:
    complete = []

    def work(_net: torch.nn.Module, step: Step) -> list[float]:
        result = []
        for i in range(12):
            result.append(step(1024 if i % 2 else 512))
            complete.append(went_by())
        return result

    with umem.enable(budget=BUDGET, device="soft", policy=tiny):
        net, step = training(LAYERS, WIDTH)
        work(net, step)
        assert len(core.plan_status()["plans"]) >= 2
        del net, step
    assert len(set(complete[-4:])) == 2
    assert 0 not in complete[-4:]


def test_a_policy_that_raises_leaves_lru(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> Plan:
        raise ZeroDivisionError("of the policy")

    monkeypatch.setattr(tiny, "plan", refuse)
    with caplog.at_level(logging.WARNING, "umem"):
        planned = losses(tiny, plain)
    assert planned == losses("lru", plain)
    (record,) = caplog.records
    message = "policy tiny raised ZeroDivisionError; falling back to lru: of the policy"
    assert record.getMessage() == message
    assert record.exc_info is not None  # with the traceback, so that its author finds the line
    assert record.exc_info[2] is not None


def told(policy: Any) -> str:
    """Return the summary of a program that is short of memory."""
    summary = []

    def work(net: torch.nn.Module, step: Step) -> list[float]:
        result = plain(net, step)
        summary.append(str(umem.summary()))
        return result

    assert losses(policy, work) == losses("lru", plain)
    return summary[0]


def test_the_summary_tells_that_a_policy_raised(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "plan", lambda *_: int("boom"))
    assert "policy tiny raised ValueError: invalid literal" in (summary := told(tiny))
    assert "'boom'; lru since step 2" in summary


def test_a_policy_that_returns_no_plan_leaves_lru_and_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = []

    def forgetful(trace: StepTrace, device: DeviceProfile, budget: int) -> None:
        asked.append(Plan(trace))

    words = "policy forgetful returned no plan; lru decides from now on"
    with caplog.at_level(logging.WARNING, "umem"):
        assert words in told(forgetful)
    assert [record.getMessage() for record in caplog.records] == [words]
    assert len(asked) == 1


def test_a_policy_of_victims_needs_no_plan(caplog: pytest.LogCaptureFixture) -> None:
    def silent(trace: StepTrace, device: DeviceProfile, budget: int) -> None: ...

    asked = []

    def victims(view: CandidateView, need: int) -> list[int]:
        asked.append(need)
        return []

    vars(silent)["victims"] = victims
    with caplog.at_level(logging.WARNING, "umem"):
        assert "returned no plan" not in told(silent)
    assert not caplog.records
    assert asked


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (lambda _: [1, 2], "policy tiny returned a list; allowed: a umem.policies.Plan, or None"),
        (lambda trace: Plan(trace, headroom="8MiB"), "the plan's headroom='8MiB'"),  # type: ignore[arg-type]
        (lambda trace: Plan(trace, headroom=-5), "headroom: -5; allowed: 0 to"),
    ],
)
def test_what_is_no_plan_leaves_lru(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, plan: Callable[[StepTrace], Any], words: str
) -> None:
    monkeypatch.setattr(tiny, "plan", lambda trace, *_: plan(trace))
    summary = told(tiny)
    assert "policy tiny raised PlanError: " in summary
    assert words in summary


def test_a_plan_without_effect_is_named_once(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def dead(trace: StepTrace, device: object, budget: int) -> Plan:
        tensors = [t for t in range(trace.n_tensors) if trace.last[t] < trace.n_ops - 1][:2]
        return Plan(trace, evict=tuple(Move(trace.n_ops - 1, tensor) for tensor in tensors))

    monkeypatch.setattr(tiny, "plan", dead)
    with caplog.at_level(logging.WARNING, "umem"):
        planned = losses(tiny, plain)
    assert planned == losses("lru", plain)
    (record,) = caplog.records
    assert "the plan of policy tiny has" in record.getMessage()
    assert "the tensor is alive in ops" in record.getMessage()


def test_a_plan_of_ops_that_are_not_there_leaves_lru(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiny, "plan", lambda trace, *_: Plan(trace, evict=(Move(1_000_000, 0),)))
    with caplog.at_level(logging.WARNING, "umem"):
        planned = losses(tiny, plain)
    assert planned == losses("lru", plain)
    last = caplog.records[-1].getMessage()
    assert "policy tiny raised PlanError; falling back to lru" in last
    assert "evict: Move(after=1000000, tensor=0): the step has ops 0 to " in last


def test_a_function_is_a_policy() -> None:
    planned = Tiny()

    def shuttle(trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:
        return planned.plan(trace, device, budget)

    assert losses(shuttle, plain) == losses("lru", plain)
    assert len(planned.planned) == 1
    with umem.enable(budget=BUDGET, device="soft", policy=shuttle) as session:
        assert "shuttle" in repr(session)
        assert umem.enable(budget=BUDGET, device="soft", policy=shuttle).settings is not None
        with pytest.raises(umem.StateError, match="policy"):
            umem.enable(budget=BUDGET, device="soft", policy="lru")


def test_a_policy_that_does_not_load_leaves_umem_off() -> None:
    with pytest.raises(umem.ConfigError, match=r"policy=: the policy 'no_such:plan' does not load"):
        umem.enable(budget=BUDGET, device="soft", policy="no_such:plan")
    assert not umem.is_enabled()


def grow() -> None:
    umem.set_budget("32MiB")
    assert core.plan_status()["plans"] == []


def grow_natively() -> None:
    """Grow it as torch.cuda.set_per_process_memory_fraction does, without umem's Python."""
    core.set_device_budget(0, 32 << 20)


@pytest.mark.parametrize("change", [grow, grow_natively])
def test_another_budget_is_another_plan(tiny: Tiny, change: Callable[[], None]) -> None:
    with umem.enable(budget=BUDGET, device="soft", policy=tiny):
        net, step = training(LAYERS, WIDTH)
        for _ in range(4):
            step(64)
        change()
        for _ in range(5):
            step(64)
        assert [budget >> 20 for _, budget in tiny.planned] == [24, 32]
        assert core.plan_status()["complete"] > 0
        del net, step


@pytest.mark.parametrize("way", ["follower", "native"])
def test_a_step_of_the_old_budget_does_not_judge_the_new_plan(way: str) -> None:
    def shrink() -> bool:
        core.set_device_budget(0, 24 << 20)
        return True

    class Follower:
        steps = 0

        def step_ended(self) -> bool:
            self.steps += 1
            return self.steps == 3 and shrink()

    with umem.enable(budget="256MiB", device="soft", policy="auto") as session:
        assert session.planner is not None
        if way == "follower":
            session.planner._follower = Follower()  # type: ignore[assignment]
        umem.step()
        _, step = training(LAYERS, WIDTH)
        for number in range(12):
            if number == 2 and way == "native":
                shrink()
            step(64)
            umem.step()
        assert umem.stats().plans_rolled_back == 0
        assert core.plan_status()["plans"] != []
        del _, step


@pytest.mark.parametrize("empty", [{2}, {2, 5, 9}, set(range(2, 20))])
def test_steps_without_operators_are_neither_planned_nor_compared(empty: set[int]) -> None:
    with umem.enable(budget=BUDGET, device="soft", policy="auto"):
        net = torch.nn.Sequential(*(Scale(1024) for _ in range(10)))
        x = torch.randn(1024, 1024)
        for number in range(20):
            with torch.no_grad():
                net(x)
            umem.step()
            if number in empty:
                umem.step()
            if number == 3 and len(empty) > 2:  # while steps are recorded
                umem.set_budget("26MiB")
                umem.step()
        assert len(core.plan_status()["plans"]) == 1
        assert umem.stats().plans_rolled_back == 0
        del net, x


def test_steps_that_never_repeat_are_planned_seldom(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_schedule, "_TRIES", 3)
    monkeypatch.setattr(recording_schedule, "_EVERY", 10)
    with umem.enable(budget=BUDGET, device="soft", policy=tiny):
        net, step = training(LAYERS, WIDTH)
        for i in range(25):
            for _ in range(i):  # each step has one more of these
                torch.ones(1 << 19).square()
            step(64)
        assert 4 <= len(tiny.planned) <= 6
        del net, step


def test_it_says_what_it_was_asked_for(tiny: Tiny) -> None:
    with umem.enable(budget=BUDGET, device="soft", policy=tiny):
        assert "policy tiny" in umem.summary()
        assert core.current_options().policy == "planned"


def small_tensors(policy: str, *, reports: bool = False) -> tuple[list[float], dict[str, int]]:
    """The losses of a network of tensors below 2 MiB at half its peak, and what six steps took."""
    losses = []
    with umem.enable(budget="24MiB", device="soft", policy=policy):
        torch.manual_seed(0)
        layers = (m for _ in range(40) for m in (torch.nn.Linear(192, 192), torch.nn.ReLU()))
        net = torch.nn.Sequential(*layers)
        optimizer = torch.optim.Adam(net.parameters())
        x = torch.ones(512, 192)
        for i in range(16):
            if i == 10:
                before = umem.stats()
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            if reports and i % 3 == 0:
                losses += [float(p.detach().abs().sum()) for p in net.parameters()]
            losses.append(loss.item())
        after = umem.stats()
        del net, optimizer, x, loss, layers
    counters = ("bytes_in", "bytes_out", "faults", "plan_hits", "plan_misses")
    took = {name: getattr(after, name) - getattr(before, name) for name in counters}
    return losses, took | {"moved": took["bytes_in"] + took["bytes_out"]}


def test_segments_of_small_tensors_are_planned() -> None:
    expected, by_lru = small_tensors("lru")
    found, planned = small_tensors("auto")
    assert found == expected
    assert planned["plan_misses"] == 0
    assert planned["plan_hits"] > 0
    assert planned["faults"] == 0
    assert 0 < planned["moved"] < 0.8 * by_lru["moved"]


def shifted(
    policy: str, period: int, after: Callable[[int], object] = lambda _: None, *, longer: bool
) -> tuple[list[float], list[int]]:
    """The losses of 24 steps of a network of small tensors, and the bytes that each moved.

    A block shifts the others: the first step of each period holds it, or all do if `longer`.
    """
    losses, moved = [], [0]
    with umem.enable(budget="40MiB", device="soft", policy=policy):
        torch.manual_seed(0)
        scales = [torch.randn(640, 640, requires_grad=True) for _ in range(12)]
        optimizer = torch.optim.SGD(scales, lr=0.01, momentum=0.9)
        held = None
        for i in range(24):
            optimizer.zero_grad()
            if i % period == 0 or not longer:
                held = torch.zeros(1 << 18)
            if i % period and not longer:
                held = None
            x = torch.ones(640, 640)
            for scale in scales:
                x = (x * scale).tanh()
            loss = x.square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            stats = umem.stats()
            moved.append(stats.bytes_in + stats.bytes_out)
            after(i)
            if i % period == period - 1 and longer:
                held = None
        del scales, scale, optimizer, x, loss, held
    return losses, [b - a for a, b in itertools.pairwise(moved)]


@pytest.mark.parametrize(
    ("policy", "period"),
    [
        ("auto", 3),
        pytest.param("auto", 2, marks=pytest.mark.nightly),
        pytest.param("belady", 2, marks=pytest.mark.nightly),
    ],
)
def test_steps_with_small_blocks_at_other_places_have_plans_of_their_own(
    policy: str, period: int
) -> None:
    expected, by_lru = shifted("lru", period, longer=True)
    found, planned = shifted(policy, period, longer=True)
    assert found == expected
    assert max(planned[12:]) < 0.7 * min(by_lru[12:])


@pytest.mark.parametrize("which", [0, 1])
def test_a_dropped_plan_does_not_take_the_steps_of_another(which: int) -> None:
    followed = []

    def after(step: int) -> None:
        followed.append(went_by())
        if step == 14:
            core.roll_back_plan(sorted(set(followed[12:]))[which])

    shifted("auto", 3, after, longer=False)
    assert len(set(followed[12:15])) == 2
    assert followed[15:] == followed[12:15] * 3


def wandering(steps: int, probes: int) -> list[float]:
    """Train with half of the activations in small blocks, which the third step has elsewhere.

    Before that, a small module runs without gradients: each of these steps has a plan, too.
    """
    probe = torch.nn.Linear(64, 64)
    with torch.no_grad():
        for _ in range(probes):
            probe(torch.ones(64, 64))
    net, step = training(LAYERS, WIDTH)
    held: list[torch.Tensor] = []
    found = []
    for number in range(steps):
        if number == 0:
            held = [torch.zeros(1 << 17) for _ in range(24)]
        x = torch.full((128, WIDTH), 0.5, requires_grad=True)
        for _ in range(24):
            x = x.sin()
        x.sum().backward()
        if number == 1:
            held.clear()
        found.append(step(64))
    del net
    return found


@pytest.mark.parametrize("probes", [0, 12])
def test_blocks_that_get_their_places_later_cost_no_more_than_under_lru(probes: int) -> None:
    losses, moved = [], []
    for policy in ("lru", "auto"):
        with umem.enable(budget="20MiB", device="soft", policy=policy):
            losses.append(wandering(16, probes))
            stats = umem.stats()
            moved.append(stats.bytes_in + stats.bytes_out)
    assert losses[0] == losses[1]
    assert moved[1] < moved[0]


def test_ops_on_small_tensors_that_come_now_and_then_end_no_plan() -> None:
    _, planned = small_tensors("auto", reports=True)
    assert planned["plan_hits"] >= 0.95 * (planned["plan_hits"] + planned["plan_misses"])


def test_a_program_without_steps_is_told() -> None:
    with umem.enable(budget="16MiB", device="soft"):
        tensors = [torch.ones(1 << 20) for _ in range(8)]
        for tensor in tensors:
            tensor.add_(1)
        assert "no steps were seen, so nothing is planned" in str(umem.summary())
        del tensor, tensors
