"""The report: figures against ones worked out by hand, findings against replays of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import schemas, synthetic
from support.steps import Tensor, make_step
from support.synthetic import write

from umem import _core
from umem.base.device_profiles import DeviceProfile
from umem.base.units import MIB, with_staging
from umem.cli import main
from umem.errors import ConfigError, OutOfMemoryError
from umem.recompute.planner.host_updates import SHARES
from umem.report import causes, findings, make, page, timeline
from umem.report.causes import Cause
from umem.report.timeline import OTHER, MoveKind, Moves, Timeline
from umem.simulation import replay
from umem.trace import origin
from umem.trace.ids import BlockId, TensorIndex
from umem.trace.schema import Alloc, Free, Op
from umem.trace.step_builder import StepBuilder
from umem.trace.step_trace import Kind, StepTrace

PAGE = 2 * MIB
# A page takes 10 µs in and 20 µs out.
LINK = DeviceProfile("link", PAGE / 10, PAGE / 20, 45.0, 1 << 40, "made up")


def step_of(events: Any) -> StepTrace:
    builder = StepBuilder()
    for event in events:
        builder.add(event)
    return builder.step()


def weights(count: int = 3, pages: int = 4) -> StepTrace:
    """Ops of 1 ms, each reading its own weight."""
    tensors = [Tensor(pages * PAGE, {i: False}, Kind.PERSISTENT, "param") for i in range(count)]
    return make_step([1000.0] * count, tensors)


def logged(step: StepTrace, policy: str, budget: int) -> Timeline:
    return timeline.of(step, LINK, replay.replay_logged(step, policy, LINK, budget))


def content(step: StepTrace, budget: int, policy: str = "lru", **more: Any) -> page.Content:
    return make.content(step, LINK, budget, title="a step", policy=policy, **more)


# --- the timeline of real replays --------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "auto", "none"])
def test_a_timelines_bytes_and_times_are_the_engines_figures(policy: str) -> None:
    step = step_of(synthetic.training(8, 4 * PAGE, 6 * PAGE, 3))
    line = logged(step, policy, step.peak_bytes // 2)
    result, moves = line.result, line.moves
    assert result.bytes_in > 0
    assert moves.only(MoveKind.IN).pages.sum() * PAGE == result.bytes_in
    assert moves.only(MoveKind.OUT, MoveKind.COPY).pages.sum() * PAGE == result.bytes_out
    assert moves.only(MoveKind.DISCARD).pages.sum() * PAGE == result.bytes_discarded
    assert line.end_us[-1] == pytest.approx(result.step_us)
    assert line.stall_us.sum() == pytest.approx(result.stall_us)
    assert (np.diff(line.changes.us) >= 0).all()


def test_pages_on_the_device_never_exceed_the_budget_and_reach_what_the_engine_counted() -> None:
    step = step_of(synthetic.training(8, 4 * PAGE, 6 * PAGE, 3))
    line = logged(step, "auto", step.peak_bytes // 2)
    changes = line.changes
    last = np.append(np.diff(changes.us) > 0, True)  # per moment
    total = np.cumsum(changes.pages)[last]
    assert total.min() >= 0
    assert total.max() * PAGE <= line.result.peak_resident <= line.result.budget
    assert total.max() * PAGE >= 0.9 * line.result.peak_resident
    for tensor in range(step.n_tensors):
        mine = np.cumsum(np.where(changes.tensor == tensor, changes.pages, 0))[last]
        assert mine.min() >= 0
        assert mine.max() * PAGE <= step.bytes[tensor]


def test_the_changes_of_larger_tensors_are_no_more() -> None:
    # Neither slows down the page: a run of pages that move alike has one history.
    small, large = (
        logged(step, "lru", 2 * step.peak_bytes // 3)
        for step in (weights(pages=8), weights(pages=32))
    )
    assert len(small.changes.us) == len(large.changes.us) > 0
    assert (4 * small.changes.pages == large.changes.pages).all()


def test_in_a_cycle_of_weights_each_comes_in_and_leaves_once() -> None:
    # Three weights of 4 pages and capacity for two: LRU misses each one, each time.
    line = logged(weights(), "lru", 8 * PAGE)
    came = line.moves.only(MoveKind.IN)
    assert sorted(came.tensor.tolist()) == [0, 1, 2]
    assert came.pages.tolist() == [4, 4, 4]
    for tensor, begin, end, op in zip(
        came.tensor.tolist(), came.start_us, came.end_us, came.op.tolist(), strict=True
    ):
        assert end - begin == pytest.approx(40.0), "4 pages of 10 µs"
        assert op == tensor, "each op reads its own weight"


def test_transfers_that_a_step_leaves_behind_are_in_the_next_ones_lane_but_not_in_its_bytes() -> (
    None
):
    # 64 pages leave during the last op, which is shorter than their 1280 µs.
    step = make_step(
        [100.0, 100.0],
        [
            Tensor(64 * PAGE, {0: True}, Kind.PERSISTENT, "param"),
            Tensor(64 * PAGE, {1: True}, Kind.PERSISTENT, "param"),
        ],
    )
    line = logged(step, "auto", 72 * PAGE)
    lane = line.lane(MoveKind.IN, MoveKind.OUT)
    assert (lane.start_us >= 0).all()
    assert len(lane.kind) == len(line.moves.only(MoveKind.IN, MoveKind.OUT).kind) + len(
        line.early.only(MoveKind.IN, MoveKind.OUT).kind
    )
    moved = line.moves.only(MoveKind.OUT, MoveKind.COPY).pages.sum() * PAGE
    assert moved == line.result.bytes_out


def test_only_a_device_without_memory_logs_moves() -> None:
    options = replay._options("lru", LINK, 16 * PAGE, 0)
    native = _core.Replay(options, backed=True)
    try:
        native.set_step(replay.columns_of(weights(1)))
        with pytest.raises(Exception, match="without memory behind it only"):
            native.run_logged()
    finally:
        native.close()


def test_a_log_is_of_the_last_step_and_changes_no_figure() -> None:
    step = step_of(synthetic.training(8, 4 * PAGE, 6 * PAGE, 3))
    budget = step.peak_bytes // 2
    logged_too = replay.replay_logged(step, "lru", LINK, budget).result
    plain = replay.replay_step(step, "lru", LINK, budget)
    assert plain.steps == logged_too.steps == 3, "a log takes no steps of its own"
    same = dataclasses.replace(plain, events_per_s=logged_too.events_per_s)  # in real time
    assert logged_too == same


def test_moves_of_a_step_without_a_log_are_an_error() -> None:
    native = replay.open_step(weights(1), "lru", LINK, 16 * PAGE)
    try:
        native.run_logged()
        assert len(native.moves()["kind"])
        native.run_step(1)
        with pytest.raises(Exception, match="the last step has no log: call run_logged"):
            native.moves()
    finally:
        native.close()


# --- causes, on handmade timelines ---------------------------------------------------------


def by_hand(
    step: StepTrace, end_us: list[float], moves: list[tuple[MoveKind, int, int, int, float, float]],
    fault: bool = False, unused: bool = False,
) -> Timeline:  # fmt: skip
    """Return a timeline of moves of (kind, tensor, pages, op, start, end)."""
    rows = list(zip(*moves, strict=True)) or [()] * 6
    kind, tensor, pages, op = (np.array(row, np.int64) for row in rows[:4])
    start, end = (np.array(row, np.float64) for row in rows[4:])
    some = np.full(len(kind), False)
    all_moves = Moves(
        kind, tensor, np.zeros_like(kind), pages, op, start, start, end, some | fault, some | unused
    )
    result = replay.replay_step(step, "lru", LINK, 1 << 30)
    placed = np.full(step.n_tensors, -1)
    ends = np.array(end_us)
    return Timeline(step, LINK, result, ends, all_moves, all_moves.where(some), placed)


def test_a_late_fetch_costs_what_is_left_of_it_and_should_have_begun_earlier() -> None:
    # Ops of 1 ms. The third waits 1.5 ms for its weight: its fetch should have started two ops
    # earlier.
    line = by_hand(weights(), [1000.0, 2000.0, 4500.0], [(MoveKind.IN, 2, 4, 1, 1500.0, 3500.0)])
    assert line.stall_us.tolist() == [0.0, 0.0, 1500.0]
    assert causes.waits(line) == [causes.Wait(2, 1500.0, 2, "late", 2)]


def test_a_stall_is_divided_by_the_time_that_each_transfer_takes_of_it() -> None:
    step = make_step(
        [1000.0, 1000.0],
        [Tensor(4 * PAGE, {1: False}, Kind.PERSISTENT, "param") for _ in range(2)],
    )
    moves = [(MoveKind.IN, 0, 4, 1, 900.0, 1100.0), (MoveKind.IN, 1, 4, 1, 1100.0, 1400.0)]
    line = by_hand(step, [1000.0, 2400.0], moves, fault=True)
    found = causes.waits(line)
    assert [(wait.tensor, wait.why) for wait in found] == [(0, "fault"), (1, "fault")]
    assert [wait.us for wait in found] == pytest.approx([100.0, 300.0])


@pytest.mark.parametrize(
    ("moves", "why", "tensor"),
    [
        ([(MoveKind.FILL, 1, 4, 1, 1e3, 1e3), (MoveKind.OUT, 0, 4, 1, 900.0, 1300.0)], "room", 1),
        ([(MoveKind.HOST, 1, 4, 0, 500.0, 1300.0)], "host", 1),
        ([(MoveKind.IN, 2, 4, 0, 500.0, 1300.0)], "queue", 2),
        ([], "other", OTHER),
    ],
)  # fmt: skip
def test_a_stall_without_a_fetch_of_the_operators_tensors_has_its_cause(
    moves: list[Any], why: str, tensor: int
) -> None:
    line = by_hand(weights(), [1000.0, 2300.0, 3300.0], moves)
    assert [(w.op, w.why, w.tensor) for w in causes.waits(line)] == [(1, why, tensor)]
    assert causes.waits(line)[0].us == pytest.approx(300.0)


def test_bytes_are_told_apart_by_cause_and_role() -> None:
    moves = [
        (MoveKind.IN, 0, 3, 0, 0.0, 30.0),
        (MoveKind.OUT, 1, 2, 0, 0.0, 40.0),
        (MoveKind.COPY, 1, 1, 0, 40.0, 60.0),
        (MoveKind.DROP, 2, 4, 1, 0.0, 0.0),
        (MoveKind.DISCARD, OTHER, 5, 1, 0.0, 0.0),
        (MoveKind.FILL, 2, 9, 1, 0.0, 0.0),
    ]
    found = {c.name: c for c in causes.bytes_by_cause(by_hand(weights(), [1e3, 2e3, 3e3], moves))}
    assert {name: cause.bytes // PAGE for name, cause in found.items()} == {
        "in, needed": 3, "in, by faults": 0, "in, unused": 0, "out, needed later": 2,
        "out, ahead": 1, "unchanged, not copied": 4, "dead, never moved": 5,
    }  # fmt: skip
    assert found["out, ahead"].by_role == {"param": PAGE}
    assert found["dead, never moved"].by_role == {causes.SMALL: 5 * PAGE}


def test_what_leaves_without_an_access_was_fetched_in_vain() -> None:
    moves = [(MoveKind.IN, 0, 4, 0, 0.0, 40.0)]
    line = by_hand(weights(), [1e3, 2e3, 3e3], moves)
    gone = by_hand(weights(), [1e3, 2e3, 3e3], [(MoveKind.DROP, 0, 3, 1, 0.0, 0.0)], unused=True)
    both = Moves(*(np.concatenate(columns) for columns in zip(line.moves, gone.moves, strict=True)))
    found = causes.bytes_by_cause(
        Timeline(line.step, LINK, line.result, line.end_us, both, line.early, line.placed)
    )
    sizes = {cause.name: cause.bytes // PAGE for cause in found}
    assert (sizes["in, needed"], sizes["in, unused"]) == (1, 3)


# --- findings ----------------------------------------------------------------------------------


def test_the_budget_of_a_finding_removes_the_stall_in_a_replay_of_its_own() -> None:
    step = step_of(synthetic.training(8, 4 * PAGE, 6 * PAGE, 3))
    shown = content(step, step.peak_bytes // 2)
    named = [one for one in shown.findings if one.setting.startswith("budget=")]
    assert named
    budget = int(re.findall(r"budget=(\d+)MiB", named[0].setting)[0]) * MIB
    again = replay.replay_step(step, "lru", LINK, budget)
    assert again.stall_us <= findings.GONE * shown.line.result.stall_us
    assert again.step_us == pytest.approx(named[0].step_us)
    assert budget < step.peak_bytes + 16 * PAGE


@pytest.mark.parametrize("share", [0.5, 2.0], ids=["stalls", "fits"])
def test_a_large_step_is_replayed_once_and_the_page_says_so(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(synthetic.training(8, 4 * PAGE, 6 * PAGE, 3))
    monkeypatch.setattr(findings, "_TRIES", ((step.n_ops - 1, 6),))
    monkeypatch.setattr(findings, "_PLANNED_OPS", step.n_ops - 1)
    monkeypatch.setattr(make, "COMPARED_OPS", step.n_ops - 1)
    made: list[int] = []

    class Counted(_core.Replay):
        def __init__(self, *args: Any) -> None:
            made.append(len(made))
            super().__init__(*args)

    monkeypatch.setattr(_core, "Replay", Counted)
    shown = content(step, int(share * step.peak_bytes), compared=None)
    assert len(made) == 1
    assert not any(one.setting for one in shown.findings)
    text = f"Not tried: other budgets: for steps of up to {step.n_ops - 1:,} operators."
    assert text in shown.notes


@pytest.mark.parametrize(
    ("us", "text"),
    [(0.5, "0.0005 ms"), (999.4e3, "999 ms"), (999.6e3, "1 s"), (1.234e9, "1,234 s")],
)
def test_times_have_a_unit_that_needs_no_exponent(us: float, text: str) -> None:
    assert findings._ms(us) == text


def test_a_better_policy_is_named_with_its_own_time() -> None:
    step = step_of(synthetic.training(8, 4 * PAGE, 6 * PAGE, 3))
    shown = content(step, step.peak_bytes // 2, compared=("auto",))
    (named,) = [one for one in shown.findings if one.setting == "policy=auto"]
    again = replay.replay_step(step, "auto", LINK, step.peak_bytes // 2)
    assert named.step_us == pytest.approx(again.step_us)
    assert again.step_us < shown.line.result.step_us


def test_a_policy_of_the_users_own_is_tried_and_named_by_its_location(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from umem.policies.default.planner import Auto\n"
        "class Mine(Auto):\n"
        "    def plan(self, trace, device, budget):\n"
        "        return super().plan(trace, device, budget)\n"
    )
    policy = f"{file}:Mine"  # its name is that of its base, auto
    step = step_of(synthetic.training(8, 4 * PAGE, 6 * PAGE, 3))
    shown = content(step, step.peak_bytes // 2, policy, compared=("lru", "auto"))
    assert {one.policy for one in shown.compared} == {"lru", "auto", policy}
    assert any(one.setting.startswith("budget=") for one in shown.findings)
    assert not [note for note in shown.notes if "Not tried: policy" in note]


def test_the_share_on_the_host_is_one_that_fits_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = step_of(synthetic.training(8, 16 * PAGE, PAGE, 3, us=300.0, optimizer=True))
    budget = step.peak_bytes // 2
    tried: list[StepTrace] = []

    def above_the_budget_at_first(new: StepTrace, *args: Any, **named: Any) -> replay.Result:
        tried.append(new)
        result = replay_step(new, *args, **named)
        if len(tried) > 1:
            return result
        return dataclasses.replace(result, raised_from=budget, step_us=1.0)

    replay_step = replay.replay_step
    monkeypatch.setattr(replay, "replay_step", above_the_budget_at_first)
    assert replay.replay_shares(step, (0.0, 1.0), "auto", LINK, budget)[0] is tried[1]


def test_a_share_that_does_not_fit_the_host_leaves_the_others() -> None:
    step = step_of(synthetic.training(8, 16 * PAGE, PAGE, 3, us=300.0, optimizer=True))
    budget, host = step.peak_bytes // 2, {"host_budget": 200 * PAGE}
    _, best = replay.replay_shares(step, SHARES, "auto", LINK, budget, **host)
    assert best.share is not None
    _, alone = replay.replay_shares(step, (best.share,), "auto", LINK, budget, **host)
    assert best.step_us == alone.step_us
    with pytest.raises(OutOfMemoryError):
        replay.replay_shares(step, (0.25,), "auto", LINK, budget, **host)
    with pytest.raises(OutOfMemoryError):
        replay.replay_shares(step, SHARES, "auto", LINK, budget, host_budget=100 * PAGE)


@pytest.mark.parametrize(("pages", "level"), [(0, 0), (1, 1), (31, 1), (32, 2), (63, 3), (64, 4)])
def test_a_tensor_is_on_the_device_if_all_of_it_is(pages: int, level: int) -> None:
    assert page.level(np.array([pages]), 64).tolist() == [level]


def test_updates_on_the_host_are_a_finding_with_the_time_of_their_replay() -> None:
    step = step_of(synthetic.training(8, 16 * PAGE, PAGE, 3, us=300.0, optimizer=True))
    budget = step.peak_bytes // 2
    for policy, setting in (("auto", "optimizer=auto"), ("lru", "policy=auto optimizer=auto")):
        shown = content(step, budget, policy)
        (named,) = [one for one in shown.findings if one.setting == setting]
        _, again = replay.replay_shares(step, SHARES, "auto", LINK, budget)
        assert named.step_us == pytest.approx(again.step_us)
        assert again.step_us < 0.99 * shown.line.result.step_us


def test_a_levers_gain_is_not_that_of_the_policy_it_needs() -> None:
    """Under lru, the step gains most by the plan alone."""
    step = step_of(synthetic.training(12, 2 * PAGE, 8 * PAGE, 3, us=300.0, optimizer=True))
    shown = content(step, step.peak_bytes * 6 // 10)
    plain = replay.replay_step(step, "auto", LINK, shown.line.result.budget)
    assert plain.step_us < 0.9 * shown.line.result.step_us
    levers = [one for one in shown.findings if one.setting.startswith("policy=auto ")]
    assert levers
    for one in levers:
        gain = (plain.step_us - (one.step_us or 0)) / plain.step_us
        assert f" {findings._percent(gain)} shorter than policy auto alone." in one.text


@pytest.mark.parametrize("share", [0.5, 2.0], ids=["stalls", "fits"])
def test_with_a_disk_the_budget_of_a_finding_is_the_whole_option(share: float) -> None:
    step = step_of(synthetic.training(8, 4 * PAGE, 6 * PAGE, 3))
    plain, staged = (
        [
            int(budget)
            for one in content(step, int(share * step.peak_bytes), staging=staging).findings
            for budget in re.findall(r"budget=(\d+)MiB", one.setting)
        ]
        for staging in (0, 2 * PAGE)
    )
    assert plain
    assert [budget * MIB for budget in staged] == [with_staging(budget * MIB) for budget in plain]


def test_no_budget_above_the_devices_memory_is_named() -> None:
    step = step_of(synthetic.training(8, 4 * PAGE, 6 * PAGE, 3))
    budget = step.peak_bytes // 2
    enough = content(step, budget)
    small = dataclasses.replace(LINK, memory_bytes=step.peak_bytes * 3 // 4)
    none = make.content(step, small, budget, title="a step", policy="lru")
    assert any(one.setting.startswith("budget=") for one in enough.findings)
    assert not any(one.setting.startswith("budget=") for one in none.findings)


def test_a_step_with_updates_on_the_host_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = synthetic.training(8, 16 * PAGE, PAGE, 3, us=300.0, optimizer=True)
    trace = write(tmp_path / "t.jsonl", events)
    assert main(["report", str(trace), "--budget", "50%", "--optimizer", "auto", "--json"]) == 0
    notes = schemas.read("report", capsys.readouterr().out)["notes"]
    for what in ("recomputation", "updates on the host"):
        assert f"Not tried: {what}: the step already has updates on the host." in notes


@pytest.mark.parametrize("updates", [(), ("--optimizer", "auto")])
def test_every_replay_of_a_page_has_the_host_budget(
    updates: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits: list[int] = []

    class Watched(_core.Replay):
        def __init__(self, options: _core.Options) -> None:
            limits.append(options.host_budget_bytes)
            super().__init__(options)

    monkeypatch.setattr(_core, "Replay", Watched)
    events = synthetic.training(8, 16 * PAGE, PAGE, 3, us=300.0, optimizer=True)
    trace = write(tmp_path / "t.jsonl", events)
    assert main(["report", str(trace), "--host-budget", "4GiB", "--json", *updates]) == 0
    assert len(limits) > 5
    assert set(limits) == {4 << 30}


def test_what_cannot_be_tried_is_left_out_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(synthetic.training(8, 16 * PAGE, PAGE, 3, us=300.0, optimizer=True))
    trials = findings.Trials(step, LINK)
    assert trials.run("nonsense", 16 * PAGE) is trials.run("nonsense", 16 * PAGE) is None
    (told,) = trials.left_out
    assert told.startswith("policy nonsense with ")

    def refused(*_: object, **__: object) -> None:
        raise ConfigError("not here")

    monkeypatch.setattr(replay, "replay_shares", refused)
    monkeypatch.setattr(replay, "simulate_recompute", refused)
    shown = content(step, step.peak_bytes // 2)
    assert "Not tried: updates on the host: not here." in shown.notes
    assert "Not tried: recomputation: not here." in shown.notes


def test_bytes_fetched_in_vain_name_the_policy_that_wastes_fewer() -> None:
    step = weights()
    result = dataclasses.replace(
        replay.replay_step(step, "lru", LINK, 1 << 30), bytes_in=100 * MIB, stall_us=50.0
    )
    causes = [Cause("in, unused", True, "", {"parameters": 10 * MIB})]
    better = dataclasses.replace(result, policy="auto", prefetched_unused=MIB)
    (named,) = findings._unused(result, causes, [result, better])
    assert named.text.startswith("10 MiB, 10 % of the bytes in, were fetched and not used.")
    assert named.text.endswith("Policy auto wastes 1 MiB.")
    assert (named.setting, named.step_us, named.weight) == ("policy=auto", result.step_us, 5.0)
    slower = dataclasses.replace(better, step_us=2 * result.step_us)
    (alone,) = findings._unused(result, causes, [slower])
    assert (alone.setting, alone.step_us) == ("", None)
    assert findings._unused(dataclasses.replace(result, bytes_in=1 << 40), causes, []) == []


def test_a_step_that_does_not_stall_is_told_how_little_it_needs() -> None:
    step = step_of(synthetic.training(8, 4 * PAGE, 6 * PAGE, 3))
    shown = content(step, 4 * step.peak_bytes)
    assert "does not stall" in shown.findings[0].text
    (named,) = [one for one in shown.findings if one.setting.startswith("budget=")]
    budget = int(re.findall(r"budget=(\d+)MiB", named.setting)[0]) * MIB
    assert budget < 4 * step.peak_bytes
    again = replay.replay_step(step, "lru", LINK, budget)
    assert again.step_us <= 1.01 * shown.line.result.step_us


def test_stalls_are_said_with_their_share_their_tensors_and_how_late_they_came() -> None:
    step = step_of(synthetic.training(8, 4 * PAGE, 6 * PAGE, 3))
    shown = content(step, step.peak_bytes // 2)
    total = sum(wait.us for wait in shown.waits)
    assert total == pytest.approx(shown.line.result.stall_us)
    texts = [one.text for one in shown.findings if "of the stall" in one.text]
    assert texts
    groups: defaultdict[tuple[str, str], float] = defaultdict(float)
    for wait in shown.waits:
        of = "" if wait.why == "other" else findings.label(shown.line, wait.tensor)
        groups[wait.why, of] += wait.us
    largest = sorted(groups, key=lambda named: -groups[named])
    for text, (why, of) in zip(texts, largest, strict=False):
        assert text.startswith(f"{findings._percent(groups[why, of] / total)} of the stall (")
        assert of in text
        mine = [wait for wait in shown.waits if wait.why == why == "late"]
        late = re.search(r"fetched (\d+) operators? late", text)
        assert (late is not None) == bool(mine)
        assert late is None or int(late[1]) in {wait.late_ops for wait in mine}


# --- the page ----------------------------------------------------------------------------------


def data_of(text: str) -> list[dict[str, Any]]:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert len(found) == 1
    steps: list[dict[str, Any]] = json.loads(found[0])
    return steps


@pytest.fixture(scope="module")
def shown() -> page.Content:
    step = step_of(synthetic.training(8, 4 * PAGE, 6 * PAGE, 3))
    return content(step, step.peak_bytes // 2)


def test_the_page_is_one_file_without_the_network(shown: page.Content) -> None:
    text = page.render([shown])
    assert "://" not in text.replace("data:", "")
    assert not re.search(r"<(?:link|script|img|iframe)[^>]+(?:src|href)=(?![\"']data:)", text)
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert "url(" not in text
    for scheme in ("prefers-color-scheme: dark", "color-scheme: light dark", "width=device-width"):
        assert scheme in text


def test_the_page_holds_the_figures_of_the_replay(shown: page.Content) -> None:
    (data,) = data_of(page.render([shown]))
    result = shown.line.result
    assert data["step_us"] == result.step_us
    assert data["bytes_in"] == result.bytes_in
    lanes = {lane["name"]: lane for lane in data["lanes"]}
    assert sum(lanes["in"]["amount"]) >= result.bytes_in
    assert sum(lanes["stall"]["amount"]) == pytest.approx(result.stall_us, abs=1.0)
    assert sum(lanes["compute"]["parts"]) == shown.line.step.n_ops
    total = np.sum([[*accumulate(series)] for series in data["memory"]["bytes"]], axis=0)
    assert total.max() * PAGE <= result.peak_resident
    ticks = [*accumulate(data["memory"]["t"])]
    assert ticks == sorted(ticks)
    assert ticks[-1] <= page.TICKS


def test_names_from_a_trace_cannot_leave_their_place_in_the_page(shown: page.Content) -> None:
    bad = "</script><script>alert(1)</script><!--"
    origins = {
        shown.line.step.block_of(TensorIndex(t)): bad for t in range(shown.line.step.n_tensors)
    }
    named = page.Content(
        bad, shown.line, shown.causes, shown.waits, shown.findings, shown.compared, origins
    )
    text = page.render([named])
    assert "<script>alert" not in text
    (data,) = data_of(text)
    assert data["title"] == bad
    assert data["top"][0]["origin"] == bad


def test_a_title_that_looks_like_a_place_in_the_page_stays_text(shown: page.Content) -> None:
    title = "{{data}} {{script}} {{none}}.jsonl"
    text = page.render([dataclasses.replace(shown, title=title)])
    assert f"<title>{title}</title>" in text
    assert data_of(text)[0]["title"] == title


def test_segments_that_a_screen_cannot_tell_apart_are_joined() -> None:
    many = np.arange(200_000) * (page.TICKS // 200_000)
    lane = page._lane("in", many, many + 3, [0] * len(many), np.full(len(many), PAGE))
    assert len(lane["begin"]) < 4000
    assert sum(lane["parts"]) == len(many)
    assert sum(lane["amount"]) == len(many) * PAGE
    assert lane["whole"] == len(many)


def test_segments_are_those_of_a_walk_over_all_parts() -> None:
    random = np.random.default_rng(7)
    count, width = 8_000, page.TICKS // page._SEGMENTS
    gaps, lengths = (random.geometric(1 / 65, count) - 1 for _ in range(2))
    lengths[::97] = 2 * width  # wider than what is joined
    ends = np.cumsum(gaps + lengths)
    begins = ends - lengths
    amounts = random.integers(1, 1000, count)
    walk: list[list[int]] = []  # begin, end, name, amount, parts, the largest amount
    for i, (begin, end, amount) in enumerate(zip(begins, ends, amounts, strict=True)):
        last = walk[-1] if walk else None
        if last and begin - last[1] <= width // 2 and end - last[0] <= width:
            last[1], last[3], last[4] = end, last[3] + amount, last[4] + 1
            if amount > last[5]:
                last[2], last[5] = i, amount
        else:
            walk.append([begin, end, i, amount, 1, amount])
    assert max(row[4] for row in walk) > 2
    lane = page._lane("in", begins, ends, range(count), amounts)
    assert lane["begin"] == page._deltas(np.array([row[0] for row in walk]))
    assert lane["length"] == [row[1] - row[0] for row in walk]
    assert lane["of"] == [row[2] for row in walk]
    assert lane["amount"] == [row[3] for row in walk]
    assert lane["parts"] == [row[4] for row in walk]


def test_curves_keep_their_highest_points() -> None:
    values = np.zeros(1_000_000, np.int64)
    values[777_777] = 5
    chosen = page._peaks(np.arange(1_000_000), values)
    assert len(chosen) <= page._POINTS + 1
    assert values[chosen].max() == 5


# --- origins -----------------------------------------------------------------------------------


def test_a_source_line_loses_the_folders_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = origin.keys("blocks.0", f"{tmp_path}/net/gpt.py:65")
    assert here == {"module": "blocks.0", "line": "net/gpt.py:65"}
    assert origin.text(here) == "blocks.0 · net/gpt.py:65"
    assert origin.keys("", "/opt/others/lib/nets/vgg.py:3") == {"line": "nets/vgg.py:3"}
    assert origin.keys("", f"{Path(origin.__file__)}:7") is None  # umem's own code is skipped
    assert origin.keys("", "?") is None
    assert origin.text({"module": 3, "line": "x.py:1"}) == "x.py:1"


# --- the command -------------------------------------------------------------------------------


def test_the_command_writes_a_page_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / "t.jsonl.gz", synthetic.training(6, 4 * PAGE, 6 * PAGE, 2))
    assert main(["report", str(trace), "--policy", "lru", "--compare", "auto"]) == 0
    printed = capsys.readouterr().out
    assert f"Report: {tmp_path / 't.html'}" in printed
    (data,) = data_of((tmp_path / "t.html").read_text())
    assert data["policy"] == "lru"
    assert [row["policy"] for row in data["policies"]].count("auto") == 1
    assert data["findings"][0]["text"] in printed
    assert all(row["origin"] == "not recorded" for row in data["top"])
    (tmp_path / "t.html").unlink()
    assert main(["report", str(trace), "--compare", "luru"]) == 2
    assert "luru" in capsys.readouterr().err
    assert not (tmp_path / "t.html").exists()


def test_a_traces_module_and_line_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def named(events: Any) -> Any:
        for event in events:
            if isinstance(event, Alloc) and event.tag == "activation":
                extra = {"module": "net.3", "line": "net.py:12"}
                event = Alloc(event.id, event.bytes, event.tag, event.family, 0, extra)
            yield event

    trace = synthetic.write(
        tmp_path / "t.jsonl", named(synthetic.training(6, 4 * PAGE, 6 * PAGE, 2))
    )
    assert main(["report", str(trace), "--out", str(tmp_path / "r.html"), "--json"]) == 0
    printed = schemas.read("report", capsys.readouterr().out)
    (data,) = data_of((tmp_path / "r.html").read_text())
    origins = {row["role"]: row["origin"] for row in data["top"]}
    assert origins["activation"] == "net.3 · net.py:12"
    assert origins["param"] == "not recorded"
    assert printed["page"] == str(tmp_path / "r.html")
    assert printed["top"] == data["top"]


def test_an_id_with_two_origins_has_none() -> None:
    one, other = ({"line": f"{file}.py:1"} for file in "ab")
    blocks = ((1, one), (1, other), (2, one))
    made = [Alloc(BlockId(block), PAGE, extra=extra) for block, extra in blocks]
    assert origin.of_blocks([made[0], Free(BlockId(1)), *made[1:]]) == {2: "a.py:1"}


def test_places_that_are_no_utf8_can_be_written() -> None:
    known = origin.keys("net", os.fsdecode(b"\xff.py:1"))
    assert known == {"module": "net", "line": "\\udcff.py:1"}


def test_names_of_a_trace_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = (
        dataclasses.replace(event, tag="kv\x1b[2J") if isinstance(event, Alloc) else event
        for event in synthetic.training(6, 4 * PAGE, 6 * PAGE, 2)
    )
    trace = write(tmp_path / "t.jsonl", events)
    assert main(["report", str(trace), "--budget", "40%"]) == 0
    out = capsys.readouterr().out
    assert "kv" in out
    assert "\x1b" not in out


def test_a_name_that_is_no_utf8_has_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / os.fsdecode(b"\xff.jsonl"), synthetic.training(3, PAGE, PAGE, 2))
    assert main(["report", str(trace)]) == 0
    assert "Report: " in capsys.readouterr().out
    (data,) = data_of(trace.with_suffix(".html").read_text())
    assert data["ops"] > 0


def test_a_trace_without_times_is_named_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = (
        dataclasses.replace(event, us=None) if isinstance(event, Op) else event
        for event in synthetic.training(3, 4 * PAGE, 6 * PAGE, 2)
    )
    trace = write(tmp_path / "t.jsonl", events)
    assert main(["report", str(trace), "--budget", "100%"]) == 0
    out = capsys.readouterr().out
    assert "The trace has no times of operators" in out
    assert "A step takes" not in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "r.txt"], "--out r.txt; allowed: FILE.html"),
        (["--out", "missing/r.html"], "the folder does not exist"),
        (["--policy", "lur"], "did you mean lru"),
        (["--budget", "200%"], "200%"),
        (["--device", "a100"], "there is no device profile 'a100'"),
        (["--trace-device", "3"], "--trace-device 3: the trace has none; allowed: 0"),
    ],
)
def test_a_bad_option_is_an_error_before_any_work(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.jsonl", synthetic.training(3, 4 * PAGE, 6 * PAGE, 2))
    assert main(["report", "t.jsonl", *options]) == 2
    assert words in capsys.readouterr().err
    assert not [*tmp_path.glob("*.html*")]


def test_a_trace_that_is_not_there_is_named_and_no_option_that_was_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "nodir/t.jsonl"]) == 2
    assert "nodir/t.jsonl" in (told := capsys.readouterr().err)
    assert "--out" not in told
    write(tmp_path / "t.jsonl", synthetic.training(3, 4 * PAGE, 6 * PAGE, 2))
    monkeypatch.setattr("umem.base.paths.can_hold", lambda folder: False)
    assert main(["report", "t.jsonl"]) == 2
    assert "without --out: t.html: this process cannot write" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_an_error(shown: page.Content, tmp_path: Path) -> None:
    (tmp_path / "r.html").mkdir()
    with pytest.raises(ConfigError, match=r"r\.html: Is a directory"):
        page.write(tmp_path / "r.html", [shown])
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_updates_on_the_host_have_a_lane_of_their_own(tmp_path: Path) -> None:
    events = synthetic.training(8, 4 * PAGE, 6 * PAGE, 3, optimizer=True)
    trace = write(tmp_path / "t.jsonl", events)
    out = tmp_path / "r.html"
    assert main(["report", str(trace), "--optimizer", "host", "--out", str(out)]) == 0
    (data,) = data_of(out.read_text())
    host = next(lane for lane in data["lanes"] if lane["name"] == "host")
    assert data["host_us"] > 0
    assert sum(host["length"]) * data["us_per_tick"] == pytest.approx(data["host_us"], rel=0.01)


def test_of_several_devices_the_one_that_is_asked_for_is_shown(tmp_path: Path) -> None:
    def on_two(events: Any) -> Any:
        for event in events:
            if isinstance(event, Alloc) and event.tag == "param":
                yield Alloc(BlockId(event.id + 10_000), 8 * PAGE, "input", device=1)
            yield event

    def using(events: Any) -> Any:
        from umem.trace.schema import Step

        others: list[BlockId] = []
        for event in on_two(events):
            if isinstance(event, Alloc) and event.device:
                others.append(event.id)
            if isinstance(event, Step):
                yield Op("copy", tuple(others), (), 10.0)
            yield event

    trace = synthetic.write(
        tmp_path / "t.jsonl", using(synthetic.training(4, 4 * PAGE, 6 * PAGE, 2))
    )
    out = tmp_path / "r.html"
    assert main(["report", str(trace), "--trace-device", "1", "--out", str(out)]) == 0
    (data,) = data_of(out.read_text())
    assert data["ops"] == 1
    assert any("device 1 of 2" in note for note in data["notes"])
