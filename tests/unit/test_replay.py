"""Replay in virtual time: the engine's figures, on steps computed by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import schemas, synthetic
from support.steps import Tensor, make_step, steps
from support.synthetic import write

from umem.analysis import bounds
from umem.base.device_profiles import DeviceProfile
from umem.base.units import MIB
from umem.cli import main
from umem.errors import ConfigError, TraceError
from umem.policies import registry
from umem.policies.base import Plan
from umem.simulation import replay
from umem.trace.schema import Alloc, Event, Free, Op, Step
from umem.trace.step_builder import StepBuilder
from umem.trace.step_trace import Kind, StepTrace

PAGE = 2 * MIB
# A page takes 10 µs in and 20 µs out.
LINK = DeviceProfile("link", PAGE / 10, PAGE / 20, 45.0, 1 << 40, "made up")
ALL = tuple(name for name in registry.names())
FEW = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def cyclic_step() -> StepTrace:
    """Three ops of 1 ms, each reading its own weight of 4 pages."""
    weight = [Tensor(4 * PAGE, {i: False}, Kind.PERSISTENT, "param") for i in range(3)]
    return make_step([1000.0] * 3, weight)


def step_of(events: Any) -> StepTrace:
    builder = StepBuilder()
    for event in events:
        builder.add(event)
    return builder.step()


# --- figures known by hand -------------------------------------------------------------------


def test_where_all_fits_nothing_moves_and_the_step_is_its_compute_time() -> None:
    for policy in ("lru", "auto", "belady"):
        result = replay.replay_step(cyclic_step(), policy, LINK, 12 * PAGE)
        assert result.step_us == pytest.approx(3000.0)
        assert (result.compute_us, result.stall_us) == (pytest.approx(3000.0), pytest.approx(0.0))
        assert (result.bytes_in, result.bytes_out, result.bound_bytes_in) == (0, 0, 0)
        assert result.floor_us == pytest.approx(3000.0)
        assert result.raised_from is None
        assert result.peak_resident == 12 * PAGE


def test_lru_on_a_cyclic_step_reloads_everything_one_after_the_other() -> None:
    """Before each op: 4 pages out in 80 µs, then 4 in in 40 µs; no op hides any of it."""
    result = replay.replay_step(cyclic_step(), "lru", LINK, 8 * PAGE)
    assert (result.bytes_in, result.bytes_out) == (12 * PAGE, 12 * PAGE)
    assert result.step_us == pytest.approx(3 * (1000 + 80 + 40), rel=1e-3)
    assert result.stall_us == pytest.approx(3 * 120, rel=1e-2)
    assert result.faults == 0
    assert result.evictions == 3


def test_a_plan_hides_the_weights_that_stream_by() -> None:
    """If one remained, the others' exchange would be exposed once; so all three take turns."""
    result = replay.replay_step(cyclic_step(), "auto", LINK, 8 * PAGE)
    assert (result.bytes_in, result.bytes_out) == (12 * PAGE, 0)
    assert result.step_us == result.floor_us == pytest.approx(3000, rel=1e-3)
    assert (result.plan_misses, result.prefetched_unused) == (0, 0)
    assert result.plan_hits > 0


def test_a_plan_hides_segments_of_small_tensors() -> None:
    """Each of the small weights fills most of a segment, which the plan moves as a whole."""
    small = [Tensor(1536 << 10, {i: False}, Kind.PERSISTENT, "param") for i in range(12)]
    step = make_step([1000.0] * 12, small)
    lru, planned = (replay.replay_step(step, name, LINK, 6 * PAGE) for name in ("lru", "auto"))
    assert lru.bytes_in == 12 * PAGE
    assert 0 < planned.bytes_in < 12 * PAGE
    assert planned.step_us <= 12_000 + 30  # at most one page leaves and returns in the open
    assert (planned.plan_misses, planned.faults, planned.prefetched_unused) == (0, 0, 0)


def test_a_plan_knows_segments_that_are_made_in_the_step() -> None:
    """Activations that share no segment, of a forward pass and a backward pass."""
    n = 16
    made = [Tensor(1536 << 10, {i: True, 2 * n - 1 - i: False}) for i in range(n)]
    step = make_step([1000.0] * 2 * n, made)
    lru, planned = (replay.replay_step(step, name, LINK, 8 * PAGE) for name in ("lru", "auto"))
    assert planned.bytes_in <= lru.bytes_in
    assert planned.step_us <= 2000 * n + 30
    assert lru.step_us > planned.step_us + 100
    assert (planned.plan_misses, planned.faults, planned.prefetched_unused) == (0, 0, 0)


def test_a_plan_hides_all_moves_where_there_is_time_between() -> None:
    """Activations leave after the ops that follow their creation, and return in time."""
    step = step_of(synthetic.chain(6, 2 * PAGE, us=1000.0, steps=2))
    room = 6 * PAGE
    lru, umem = (replay.replay_step(step, name, LINK, room) for name in ("lru", "auto"))
    assert umem.step_us == pytest.approx(umem.compute_us, rel=1e-3)
    assert umem.bytes_in == umem.bound_bytes_in == lru.bytes_in == 6 * PAGE
    assert lru.step_us == pytest.approx(12_000 + 3 * 60)  # each tensor: out, then in, in the open


def test_a_budget_below_the_largest_op_is_raised_and_said() -> None:
    result = replay.replay_step(cyclic_step(), "lru", LINK, PAGE)
    assert result.budget == replay.min_budget(cyclic_step()) == 5 * PAGE  # 1.05 * 4 pages
    assert result.raised_from == PAGE
    assert "raised to 10 MiB: 1.05 times" in replay.raised_note(result)
    tiny = step_of(synthetic.chain(2, PAGE, us=1.0, steps=2))
    result = replay.replay_step(tiny, "lru", LINK, PAGE)
    assert replay.raised_note(result).endswith("raised to 8 MiB: the minimum")
    fits = replay.replay_step(cyclic_step(), "lru", LINK, 8 * PAGE + 1)
    assert (fits.budget, fits.raised_from) == (8 * PAGE, None)  # whole pages


@pytest.mark.parametrize("text", ["0", "nan", "25,0", "1,2,3", "fast", "", "inf"])
def test_a_link_is_one_or_two_rates(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "trace.jsonl", "--link", text])
    assert "allowed: GB/s above 0, each way as 25, or in and out as 3.2,4.5" in (
        capsys.readouterr().err
    )


def test_a_slower_link_is_slower() -> None:
    slow = DeviceProfile("slow", PAGE / 100, PAGE / 200, 45.0, 1 << 40, "made up")
    result = replay.replay_step(cyclic_step(), "lru", slow, 8 * PAGE)
    assert result.step_us == pytest.approx(3 * (1000 + 800 + 400), rel=1e-3)


# --- every policy against the bounds ---------------------------------------------------------


@pytest.mark.parametrize("policy", ALL)
def test_no_policy_is_below_the_bounds(policy: str) -> None:
    step = step_of(synthetic.training(8, 2 * PAGE, 5 * PAGE, 3, us=200.0, small=2, optimizer=True))
    for share in (0.75, 0.5, 0.3):
        _hold_bounds(replay.replay_step(step, policy, LINK, int(share * step.peak_bytes)))


@given(steps(), st.sampled_from(ALL), st.floats(0.3, 1.0))
@FEW
def test_no_policy_is_below_the_bounds_on_random_steps(
    step: StepTrace, policy: str, share: float
) -> None:
    _hold_bounds(replay.replay_step(step, policy, LINK, int(share * step.peak_bytes)))


def _hold_bounds(result: replay.Result) -> None:
    assert result.step_us >= result.floor_us * (1 - 1e-9)
    assert result.bytes_in >= result.bound_bytes_in
    assert result.peak_resident <= result.budget
    assert result.step_us == pytest.approx(result.compute_us + result.stall_us, rel=1e-3, abs=1.0)


def test_the_planner_is_not_slower_than_lru_on_a_training() -> None:
    step = step_of(synthetic.training(16, 2 * PAGE, 8 * PAGE, 3, us=400.0))
    lru, umem = (
        replay.replay_step(step, name, LINK, step.peak_bytes // 2) for name in ("lru", "auto")
    )
    assert umem.step_us < 0.95 * lru.step_us
    assert umem.bytes_in <= lru.bytes_in


# --- files -----------------------------------------------------------------------------------


def test_a_trace_cut_off_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", cyclic_events())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match=r"t\.jsonl:\d+: "):
        replay.load(path)


def test_the_last_step_is_repeated_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program's end frees all, also what the step finds there; its first step may differ."""
    alone = write(tmp_path / "alone.jsonl", cyclic_events())
    start = [Alloc(8, PAGE), Op("first", (), (8,), 700.0), Free(8), Step()]
    end = [*(Free(i) for i in range(3)), Step(), Alloc(9, PAGE), Op("last", (9,), ())]
    path = write(tmp_path / "t.jsonl", [*start, *cyclic_events(), *end])
    for policy in ("lru", "auto"):
        results = []
        for file in (path, alone):
            words = ["--policy", policy, "--budget", "16MiB", "--repeat", "3", "--json"]
            assert main(["replay", str(file), *words]) == 0
            result = json.loads(capsys.readouterr().out)
            del result["events_per_s"]
            results.append(result)
        assert results[0] == results[1]
        step = replay.load(path).step
        again = replay.replay_step(step, policy, LINK, 8 * PAGE, repeats=3)
        assert results[0]["events"] == again.events == again.steps * (again.events // again.steps)


def test_a_device_of_an_earlier_step_is_not_replayed(tmp_path: Path) -> None:
    first = [Alloc(8, PAGE, device=1), Op("early", (8,), (), 700.0), Step()]
    end = [*(Free(i) for i in range(3)), Step()]
    path = write(tmp_path / "t.jsonl", [*first, *cyclic_events(), *end])
    assert [*replay.load_devices(path)] == [0]
    assert replay.load(path).step.n_ops == 3


def test_faults_that_cost_nothing_are_not_those_of_the_profile() -> None:
    step = cyclic_step()
    costs = [replace(LINK, fault_us=us) for us in (0.0, 1e-3, 45.0)]
    none, little, much = (
        replay.replay_step(step, "none", device, 8 * PAGE).step_us for device in costs
    )
    assert none <= little < much


@pytest.mark.parametrize("policy", ["lru", "auto"])
def test_the_host_holds_at_some_time_what_has_left(policy: str) -> None:
    """Nothing outlives the step, at whose end the host is empty."""
    step = step_of(synthetic.chain(12, 4 * PAGE))
    result = replay.replay_step(step, policy, LINK, step.peak_bytes // 2)
    assert result.peak_host >= result.bytes_out > 0


def test_a_carried_workspace_that_is_used_in_parts_is_replayed() -> None:
    """It is not cut, but the one that takes its place is."""
    step = step_of([
        Alloc(0, 32 * PAGE, "param"), Alloc(1, 16 * PAGE, "workspace"),
        Op("x", (0,), (1,), 100.0), Step(),
        Op("y", (0,), (1,), 100.0, parts=(1, 0, 4 * PAGE)), Free(1),
        Alloc(2, 16 * PAGE, "workspace"), Op("z", (0,), (2,), 100.0), Step(),
    ])  # fmt: skip
    pieces = step.pieces
    aliases = [(i, a) for i, a in enumerate(pieces.next_alias.tolist()) if a >= 0]
    assert all(pieces.bytes[i] == pieces.bytes[a] for i, a in aliases)
    assert replay.replay_step(step, "auto", LINK, 40 * PAGE).step_us > 0


def test_a_workspace_of_the_size_of_what_is_cut_stays_in_the_plan() -> None:
    """The runtime cuts it where it is free, and leaves it where it is used; so does the plan."""
    blocks: list[Event] = [
        Alloc(0, 4 * PAGE, "param"), Alloc(1, 8 * PAGE, "param"), Alloc(2, 4 * PAGE, "workspace")
    ]  # fmt: skip
    half = 2 * PAGE
    ops = [
        Op("first", (0,), (), 500.0, parts=(0, 0, half)),
        Op("product", (1, 2), (2,), 500.0),
        Op("second", (0,), (), 500.0, parts=(0, half, 2 * half)),
        Op("last", (1,), (), 500.0),
    ]
    for live in (True, False):
        scratch: list[Event] = [
            Alloc(3, 4 * PAGE, "workspace"),
            Op("made", (), (3,), 500.0),
            Free(3),
        ]
        events = [*blocks, *((*ops, Step()) if live else (*ops, *scratch, Step())) * 3]
        step = step_of(event for event in events)
        result = replay.replay_step(step, "auto", LINK, 12 * PAGE)
        assert result.plan_hits > 0
        assert result.plan_misses == 0


def cyclic_events() -> list[Event]:
    return [
        *(Alloc(i, 4 * PAGE, "param") for i in range(3)),
        *(Op("use", (i,), (), 1000.0) for i in range(3)),
        Step(),
        *(Op("use", (i,), (), 1000.0) for i in range(3)),
        Step(),
    ]


def test_what_lives_past_the_step_goes_round() -> None:
    """A gradient that the next step frees is not a leak: each repeat equals the previous one."""
    step = step_of(synthetic.training(4, PAGE, PAGE, 3, optimizer=True))
    assert Kind.CARRIED in step.kind
    result = replay.replay_step(step, "lru", LINK, 2 * step.peak_bytes, repeats=5)
    assert result.peak_resident <= step.peak_bytes + PAGE


def test_bad_arguments() -> None:
    for repeats in (0, 2.5, True, None):
        with pytest.raises(ConfigError, match=f"repeats={repeats}: .*allowed: a whole number"):
            replay.replay_step(cyclic_step(), "lru", LINK, 8 * PAGE, repeats=repeats)
    with pytest.raises(ConfigError, match="did you mean lru"):
        replay.replay_step(cyclic_step(), "lur", LINK, 8 * PAGE)

    class Silent:
        name = "silent"

        def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan | None:
            return None

    with pytest.raises(ConfigError, match="'silent' made no plan"):
        replay.replay_step(cyclic_step(), Silent(), LINK, 8 * PAGE)


def test_a_host_budget_that_is_too_small_is_an_error() -> None:
    with pytest.raises(MemoryError):
        replay.replay_step(cyclic_step(), "lru", LINK, 8 * PAGE, host_budget=PAGE)
    replay.replay_step(cyclic_step(), "lru", LINK, 8 * PAGE, host_budget=64 * PAGE)  # as before


# --- the command -----------------------------------------------------------------------------

KEYS = {
    "policy", "budget", "device", "steps", "step_us", "compute_us", "stall_us", "host_us",
    "floor_us", "bytes_in", "bytes_out", "bound_bytes_in", "bytes_discarded", "faults", "evictions",
    "prefetches", "prefetched_unused", "peak_resident", "events", "events_per_s",
    "plan_hits", "plan_misses", "peak_host",
}  # fmt: skip


def test_json_has_one_object_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "t.jsonl", synthetic.training(6, 2 * PAGE, 4 * PAGE, 2))
    peak = replay.load(path)[1]
    words = ["--policy", "lru", "auto", "--budget", "50%", "2GiB", "--json", "--link", "50"]
    assert main(["replay", str(path), *words]) == 0
    rows = [schemas.read("replay", line) for line in capsys.readouterr().out.splitlines()]
    assert [set(row) for row in rows] == [KEYS] * 4
    assert {row["device"] for row in rows} == {"a100-pcie4+50GB/s"}
    assert [row["policy"] for row in rows] == ["lru", "auto"] * 2
    assert [row["budget"] for row in rows[2:]] == [2048 * MIB] * 2
    assert {row["budget"] for row in rows[:2]} == {int(peak * 0.5) // PAGE * PAGE}
    assert all(math.isfinite(row["events_per_s"]) and row["events_per_s"] > 0 for row in rows)


def test_the_table_marks_the_fastest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = synthetic.write(
        tmp_path / "t.jsonl", synthetic.training(6, 2 * PAGE, 4 * PAGE, 2, us=300.0)
    )
    assert main(["replay", str(path), "--policy", "all", "--budget", "60%", "1%"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["policy", "budget", "of"]
    rows = [line for line in lines[1:] if any(f" {name} " in line for name in ALL)]
    assert len(rows) == 2 * len(ALL)
    for budget in (rows[: len(ALL)], rows[len(ALL) :]):
        times = [float(row.partition("a100-pcie4")[2].split()[0]) for row in budget]
        fastest = [time == min(times) for time in times]
        assert [row.startswith("*") for row in budget] == fastest
    assert any("was raised to" in line for line in lines)
    assert len({line.index("a100-pcie4") for line in rows}) == 1  # aligned


def test_the_share_that_won_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = synthetic.training(8, 16 * PAGE, PAGE, 3, us=300.0, optimizer=True)
    words = ["replay", str(synthetic.write(tmp_path / "t.jsonl", events)), "--optimizer"]
    assert main([*words, "auto", "--json"]) == 0
    best = schemas.read("replay", capsys.readouterr().out)
    assert main([*words, f"{best['share']:.0%}", "--json"]) == 0
    assert schemas.read("replay", capsys.readouterr().out)["step_us"] == best["step_us"]
    assert main([*words, "auto"]) == 0
    assert f"{best['share']:.0%} of the updates on the host" in capsys.readouterr().out


def test_another_device_than_the_traces_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    write(path, synthetic.training(4, 2 * PAGE, 4 * PAGE, 2), device="NVIDIA H200")
    told = "is not a device profile: transfers use a100-pcie4"
    assert main(["replay", str(path), "--policy", "lru"]) == 0
    assert told in capsys.readouterr().out
    assert main(["replay", str(path), "--policy", "lru", "--json"]) == 0
    assert told in capsys.readouterr().err
    assert main(["replay", str(path), "--policy", "lru", "--device", "a100-pcie4"]) == 0
    assert told not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--budget", "auto"], "--budget auto: a trace has no free memory"),
        (["--budget", "0%"], "'0%' is not a percentage above 0"),
        (["--budget", "200%"], "above 0 and up to 100"),
        (["--budget", "x"], "--budget: 'x' is not a number of bytes"),
        (["--policy", "lur"], "did you mean lru?"),
        (["--device", "a100"], "a100-pcie4"),
        (["--repeat", "0"], "--repeat 0; allowed: at least 1"),
        (["--host-budget", "0"], "--host-budget 0"),
        (["--profile", "missing.toml"], "missing.toml"),
    ],
)
def test_bad_options_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    path = write(tmp_path / "t.jsonl", cyclic_events())
    assert main(["replay", str(path), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("umem replay: ")
    assert error.count("\n") == 1
    assert reason in error


def test_a_bad_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"kind":"umem-trace","v":1}\n{"e":"free","id":3}\n')
    for name in (path, tmp_path / "none.jsonl"):
        assert main(["replay", str(name)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert str(name) in error


def test_a_replay_that_fails_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "t.jsonl", cyclic_events())
    words = ["--budget", "16MiB", "24MiB", "--policy", "lru", "--host-budget", "2MiB", "--json"]
    assert main(["replay", str(path), *words]) == 1
    failed, good = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert set(failed) == {"policy", "budget", "device", "error"}
    assert good["bytes_in"] == 0


def test_min_budget_is_that_of_the_bounds() -> None:
    step = cyclic_step()
    assert replay.min_budget(step) == bounds.min_budget(step)


def test_resident_budget_is_where_nothing_moves() -> None:
    assert replay.resident_budget(cyclic_step(), LINK) == 12 * PAGE
    events = synthetic.training(6, 3 * PAGE, 5 * PAGE, 2, small=300, optimizer=True)
    step = step_of(events)
    least = replay.resident_budget(step, LINK)
    # Small tensors share a segment or two; the sum of their bytes is not a multiple of one.
    assert step.peak_bytes <= least <= step.peak_bytes + 3 * PAGE
    enough, less = (replay.replay_step(step, "lru", LINK, least - n) for n in (0, PAGE))
    assert enough.bytes_in == enough.bytes_out == 0
    assert less.bytes_in + less.bytes_out > 0


def test_resident_budget_has_a_floor() -> None:
    tiny = make_step([1.0], [Tensor(256, {0: False}, Kind.PERSISTENT, "param")])
    assert replay.resident_budget(tiny, LINK) == 4 * PAGE


def test_resident_budget_of_a_step_beyond_any_address_space() -> None:
    tensors = [Tensor(1 << 46, {0: False}, Kind.PERSISTENT), Tensor(256, {0: True})]
    assert replay.resident_budget(make_step([1.0], tensors), LINK) == (1 << 46) + 2 * PAGE
