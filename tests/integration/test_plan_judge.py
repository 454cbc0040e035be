"""Plans that do worse than lru are dropped, in programs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.layers import Step, training  # noqa: E402

import umem  # noqa: E402
from umem.base.device_profiles import DeviceProfile  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.policies.base import Fetch, Move, Plan  # noqa: E402
from umem.session import plan_judge  # noqa: E402
from umem.session.meter import Cost, Meter  # noqa: E402
from umem.trace.step_trace import Kind, StepTrace  # noqa: E402


class Shuttle:
    """Each weight leaves after each of its uses, and returns for the next, needlessly."""

    name = "shuttle"
    rollback = True

    def __init__(self) -> None:
        self.planned = 0

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:
        self.planned += 1
        evict, fetch = [], []
        for tensor in range(trace.n_tensors):
            if not trace.large[tensor] or trace.kind[tensor] != Kind.PERSISTENT:
                continue
            uses = trace.uses(tensor).tolist()
            evict += [Move(use, tensor) for use in uses]
            fetch += [Fetch(a, b, tensor) for a, b in itertools.pairwise(uses)]
        return Plan(trace, evict=tuple(evict), fetch=tuple(fetch))


@pytest.fixture
def shuttle() -> Iterator[Shuttle]:
    yield Shuttle()
    umem.disable()


def layers() -> Step:
    return training(4, 1024)[1]  # 4 MiB a weight


def lstm() -> Step:
    """An unrolled one: most of its memory is in tensors that share pages."""
    torch.manual_seed(0)
    width = 256
    cells = torch.nn.ModuleList([torch.nn.LSTMCell(width, width) for _ in range(2)])
    optimizer = torch.optim.SGD(cells.parameters(), lr=1e-3, momentum=0.9)
    text = torch.randn(48, 64, width)

    def step(rows: int) -> float:
        optimizer.zero_grad()
        states = [(torch.zeros(rows, width), torch.zeros(rows, width)) for _ in cells]
        loss = torch.zeros(())
        for x in text[:, :rows]:
            for i, cell in enumerate(cells):
                states[i] = cell(x, states[i])
                x = states[i][0]
            loss = loss + x.square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def run(step: Step, rows: list[int]) -> tuple[list[float], list[Cost]]:
    """The losses, and what each step took."""
    losses, costs, meter = [], [], Meter()
    for batch in rows:
        meter.start()
        losses.append(step(batch))
        costs.append(meter.read())
    return losses, costs


def test_a_plan_that_moves_for_nothing_is_given_up(
    shuttle: Shuttle, caplog: pytest.LogCaptureFixture
) -> None:
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        expected, costs = run(layers(), [64] * 9)
        assert all(cost == (0, 0) for cost in costs)  # it fits
    with (
        caplog.at_level(logging.INFO, "umem"),
        umem.enable(budget="64MiB", device="soft", policy=shuttle, log="info"),
    ):
        losses, costs = run(layers(), [64] * 9)
        assert core.plan_status()["complete"] == 1
        assert "plans rolled back as slower than lru: 1" in umem.summary()
        assert umem.stats().plans_rolled_back == 1
    assert losses == expected
    assert [cost.bytes > 0 for cost in costs[2:4]] == [True, True]
    assert all(cost == (0, 0) for cost in costs[5:])  # in the fifth evicted weights return
    assert shuttle.planned == 1
    dropped = [r.getMessage() for r in caplog.records if "dropped" in r.getMessage()]
    assert len(dropped) == 1
    assert dropped[0].startswith("plan 1 dropped; its steps fall back to lru: its steps mo")


def test_what_was_given_up_is_not_planned_again_after_other_steps(shuttle: Shuttle) -> None:
    with umem.enable(budget="64MiB", device="soft", policy=shuttle):
        _, costs = run(layers(), [64] * 6 + [32] + [64] * 4 + [32] * 4 + [64] * 4)
        assert umem.stats().plans_rolled_back >= 1
    assert shuttle.planned <= 3  # of 64 rows, and of 32: the first one may see both
    assert all(cost == (0, 0) for cost in costs[-3:])


def test_the_guard_judges_plans_again_for_another_budget(shuttle: Shuttle) -> None:
    with umem.enable(budget="64MiB", device="soft", policy=shuttle):
        step = layers()
        run(step, [64] * 6)
        umem.set_budget("80MiB")
        run(step, [64] * 6)
        assert umem.stats().plans_rolled_back == 2
        assert shuttle.planned == 2
        del step


def boom(*_: object) -> Plan:
    raise ValueError("boom")


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (lambda *_: None, "it is None"),
        (boom, "ValueError: boom"),
        (lambda *_: 7, "PlanError: policy shuttle returned an int; allowed:"),
        (lambda trace, *_: Plan(trace, evict=(Move(10**6, 0),)), "evict: Move(after=1000000, "),
    ],
)
def test_a_bad_second_choice_is_none(
    shuttle: Shuttle,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    second: object,
    why: str,
) -> None:
    monkeypatch.setattr(shuttle, "second", second, raising=False)
    with (
        caplog.at_level(logging.WARNING, "umem"),
        umem.enable(budget="64MiB", device="soft", policy=shuttle),
    ):
        step = layers()
        _, costs = run(step, [64] * 12)
        umem.set_budget("80MiB")
        run(step, [64] * 12)
        assert umem.stats().plans_rolled_back == 2  # planning goes on
        assert shuttle.planned == 2
        del step
    assert [cost.bytes > 0 for cost in costs[2:4]] == [True, True]
    assert all(cost == (0, 0) for cost in costs[-3:])
    (record,) = caplog.records
    assert record.getMessage().startswith(f"policy shuttle has no second choice: {why}")


def test_a_policy_without_rollback_goes_on(
    shuttle: Shuttle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shuttle, "rollback", False, raising=False)
    with umem.enable(budget="64MiB", device="soft", policy=shuttle):
        _, costs = run(layers(), [64] * 8)
        assert umem.stats().plans_rolled_back == 0
    assert all(cost.bytes > 0 for cost in costs[2:])


def test_a_phase_that_decides_against_a_plan_does_not_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_judge, "AGAIN", 16)
    none = plan_judge.Choice.NONE
    with umem.enable(budget="24MiB", device="soft"):
        step, other = training(6, 1024)[1], training(3, 1024)[1]
        _, before = run(step, [8] * 8)
        monkeypatch.setattr(plan_judge.PlanJudge, "_best", lambda _: none)  # as a phase may do
        for _ in range(27):
            run(step, [8])
            run(other, [8])
        given_up = umem.stats().plans_rolled_back
        _, after = run(step, [8] * 26)
        assert umem.stats().plans_rolled_back == given_up > 0
        del step, other
    unplanned = after[10].bytes
    assert before[-1].bytes < 0.9 * unplanned  # which of its plans it is depends on measured times
    assert after[-1].bytes < 0.9 * unplanned


def test_what_the_second_trial_drops_counts_once(shuttle: Shuttle) -> None:
    with umem.enable(budget="64MiB", device="soft", policy=shuttle):
        _, costs = run(layers(), [64] * (plan_judge.AGAIN + 24))
        assert umem.stats().plans_rolled_back == 1
    tried = [i for i, cost in enumerate(costs) if cost.bytes > 0]
    assert 4 <= len(tried) <= 8  # two trials
    assert tried[-1] < len(costs) - 8


def test_an_unrolled_lstm_ends_up_no_worse_than_lru() -> None:
    with umem.enable(budget="22MiB", device="soft", policy="lru"):
        expected, costs = run(lstm(), [64] * 4)
        lru = costs[-1]
        assert lru.bytes > 0
    with umem.enable(budget="22MiB", device="soft", policy="auto"):
        losses, costs = run(lstm(), [64] * 6)
        given_up = umem.stats().plans_rolled_back
    assert losses[:4] == expected
    assert not costs[-1].worse_than(lru)
    if given_up:
        assert costs[-1] == lru


def moved(policy: str, steps: int) -> list[int]:
    """Return the bytes that come in during each step of a transformer, at half of its peak."""
    moved = []
    with umem.enable(budget="73MiB", device="soft", policy=policy):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
        net = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        x = torch.randn(4, 197, 384)
        for _ in range(steps):
            before = umem.stats().bytes_in
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            moved.append(umem.stats().bytes_in - before)
    return moved


def test_no_step_that_follows_a_plan_moves_more_than_one_without() -> None:
    """Also not the first one, which begins with what lru left on the device."""
    lru, auto = moved("lru", 4), moved("auto", 6)
    assert min(lru[1:]) > 0
    assert auto[1] == lru[1]
    assert max(auto[2:]) < lru[3]


def meta(policy: Any, steps: int) -> list[int]:
    """Return the bytes that each step of a meta-learner moves: two tasks, each with two updates."""
    moved = []
    with umem.enable(budget="14MiB", device="soft", policy=policy):
        torch.manual_seed(0)
        sides = (256, 1024), (1024, 1024), (1024, 5)
        weights = [torch.nn.Parameter(torch.randn(side) / side[0] ** 0.5) for side in sides]
        optimizer = torch.optim.Adam(weights)

        def loss(given: list[torch.Tensor]) -> torch.Tensor:
            x, y = torch.randn(64, 256), torch.randint(0, 5, (64,))
            out = ((x @ given[0]).tanh() @ given[1]).tanh() @ given[2]
            return torch.nn.functional.cross_entropy(out, y)

        def learned() -> torch.Tensor:
            given: list[torch.Tensor] = [*weights]
            for _ in range(2):
                slopes = torch.autograd.grad(loss(given), given, create_graph=True)
                given = [old - 0.1 * slope for old, slope in zip(given, slopes, strict=True)]
            return loss(given)

        for _ in range(steps):
            before = umem.stats()
            optimizer.zero_grad()
            (learned() + learned()).backward()
            optimizer.step()
            now = umem.stats()
            moved.append(now.bytes_in + now.bytes_out - before.bytes_in - before.bytes_out)
    return moved


def test_a_plan_without_moves_is_lru_to_the_byte() -> None:
    """As what replaces a plan that was rolled back."""
    lru = meta("lru", 8)
    assert min(lru) > 0
    assert meta(lambda trace, _device, _budget: Plan(trace), 8) == lru
