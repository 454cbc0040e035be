"""The GPU bench without a GPU: guard, deadlines, records, parts, the floor, the report."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.benches import BENCH, imports

from umem.base.units import GIB, MIB
from umem.errors import ConfigError

SECOND = 1.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of bench/gpu, or of bench, as its scripts do."""
    yield from imports(monkeypatch, "gpu")


# --- the guard -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "limit"),
    [(80 * GIB, 20 * GIB), (200 * GIB, 32 * GIB), (9 * MIB, 2 * MIB), (GIB + 3, 256 * MIB)],
)
def test_the_limit_is_a_quarter_of_what_is_free_and_32_gib(gpu: Any, free: int, limit: int) -> None:
    assert gpu("gpu.guard").limit_bytes(free) == limit


def test_the_guard_refuses_what_exceeds_the_limit_in_sum(gpu: Any) -> None:
    module = gpu("gpu.guard")
    guard = module.Guard(10 * MIB)
    guard.reserve(6 * MIB, "one")
    with pytest.raises(module.GuardError, match=r"two needs 5 MiB.*6 MiB of the allowed 10 MiB"):
        guard.reserve(5 * MIB, "two")
    assert (guard.held, guard.room) == (6 * MIB, 4 * MIB)
    guard.reserve(4 * MIB, "to the byte")
    guard.release(6 * MIB)
    assert (guard.held, guard.peak) == (4 * MIB, 10 * MIB)


@pytest.mark.parametrize("size", [0, -1])
def test_the_guard_refuses_sizes_that_would_make_room(gpu: Any, size: int) -> None:
    module = gpu("gpu.guard")
    with pytest.raises(module.GuardError, match="above 0"):
        module.Guard(MIB).reserve(size, "nothing")
    with pytest.raises(ValueError, match="above 0"):
        module.Guard(size)


def test_a_share_is_given_back_after_an_error(gpu: Any) -> None:
    guard = gpu("gpu.guard").Guard(MIB)
    with pytest.raises(KeyError), guard.share(MIB, "all"):
        raise KeyError
    assert guard.room == MIB


def test_a_training_beyond_the_limit_never_starts(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    children, guards = gpu("gpu.children"), gpu("gpu.guard")
    monkeypatch.setattr(children, "WorkerProcess", lambda *_, **__: pytest.fail("it was started"))
    spec = children.GpuSpec("resnet50", budget=GIB)
    with pytest.raises(guards.GuardError), children.worker(guards.Guard(GIB), spec):
        pass


def test_every_child_has_umems_own_guard_and_budgets_that_sum_to_the_limit(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    children, guards = gpu("gpu.children"), gpu("gpu.guard")
    monkeypatch.setenv("UMEM_GUARD", "0")
    monkeypatch.setenv("UMEM_POLICY", "none")
    seen: dict[str, str] = {}

    class Worker:
        def __init__(self, spec: object, environment: dict[str, str], **_: object) -> None:
            seen.update(environment)

        def __enter__(self) -> Worker:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(children, "WorkerProcess", Worker)
    guard = guards.Guard(GIB)
    with children.worker(guard, children.GpuSpec("gpt2", budget=256 * MIB)):
        assert guard.room == 0
    assert guard.room == GIB
    ours = {name: text for name, text in seen.items() if name.startswith("UMEM_")}
    assert ours == {
        "UMEM_GUARD": "1",
        "UMEM_BUDGET": str(256 * MIB),
        "UMEM_HOST_BUDGET": str(768 * MIB),
    }


# --- time ------------------------------------------------------------------------------------


def test_rounds_end_with_the_time_but_one_always_runs(gpu: Any) -> None:
    now = [0.0]
    deadline = gpu("gpu.deadline").Deadline(10 * SECOND, lambda: now[0])
    done = []
    for i in deadline.rounds(5):
        done.append(i)
        now[0] += 4 * SECOND
    assert done == [0, 1, 2]  # the fourth would start at 12 s
    assert list(deadline.rounds(3)) == [0]
    assert deadline.passed
    with deadline.stopped():
        now[0] += 100 * SECOND
    assert deadline.passed
    assert deadline.within(5 * SECOND).left == 0


# --- records ---------------------------------------------------------------------------------


def test_an_item_that_fails_is_kept_and_the_next_one_runs(gpu: Any, tmp_path: Path) -> None:
    record_module, raw = gpu("gpu.record"), gpu("gpu.raw")
    record = record_module.Record("micro_gates", tmp_path / "micro_gates.json")
    deadline = gpu("gpu.deadline").Deadline(60 * SECOND)

    def fail() -> None:
        raise ZeroDivisionError("of course")

    def lack() -> None:
        raise raw.CallError("cuMemDiscardBatchAsync", 500)

    def break_down() -> None:
        raise raw.CallError("cuMemFree", 700)

    def work() -> None:
        record.add("copy", [1.0, 2.0, 3.0], "GB/s")

    items = [
        record_module.Item(number, "?", action)
        for number, action in (("1", fail), ("2", lack), ("3", break_down), ("4", work))
    ]
    record_module.take(record, items, deadline)
    read = record_module.load(tmp_path / "micro_gates.json")
    assert read.errors == {
        "1": "ZeroDivisionError: of course",
        "3": "CallError: cuMemFree returned CUresult 700",
    }
    outcomes = {decision.item: decision.outcome for decision in read.decisions}
    assert outcomes["2"] == "this driver cannot: cuMemDiscardBatchAsync returned CUresult 500"
    assert read.results == record.results
    assert read.results[0].spread.median == 2.0
    assert "in fail" in read.details["tracebacks"]["1"]


def test_items_after_the_deadline_are_said_to_be_missing(gpu: Any) -> None:
    module = gpu("gpu.record")
    record = module.Record("fits")
    items = [module.Item("b", "?", lambda: pytest.fail("too late"))]
    module.take(record, items, gpu("gpu.deadline").Deadline(0))
    assert record.decisions[0].outcome == "not measured: the part's time was used up"


@pytest.mark.parametrize("text", ["", "{", '{"part": "x"}', '{"results": [{}], "decisions": []}'])
def test_a_file_that_is_no_record_counts_as_none(gpu: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert gpu("gpu.record").load(path) is None


# --- the run ---------------------------------------------------------------------------------


def test_letters_and_names_choose_parts_in_order(gpu: Any) -> None:
    parts = gpu("gpu.parts")
    chosen = parts.choose(["f", "c", "micro_gates"], False)
    assert [part.name for part in chosen] == ["micro_gates", "sizing", "fits", "peak"]
    assert {part.letter for part in parts.choose(["a"], False)} == {"a"}
    assert parts.choose([], False) == list(parts.PARTS)


def test_every_letter_ends_within_8_minutes_with_what_it_needs(gpu: Any) -> None:
    parts = gpu("gpu.parts")
    groups = parts.commands(parts.PARTS)
    assert {letter for group in groups for letter in [group[-1].letter]} == set(parts.LETTERS)
    for group in groups:
        assert sum(part.seconds for part in group) <= parts.LONGEST == 8 * 60
    for part in parts.BY_NAME.values():
        assert callable(part.load().run)


def test_a_letter_by_itself_starts_with_what_it_needs(gpu: Any) -> None:
    parts = gpu("gpu.parts")
    (group,) = parts.commands(parts.choose(["d"], False))
    assert [part.name for part in group] == ["micro_bandwidth", "sizing", "outofcore"]


def test_the_readme_has_the_limits_of_the_letters(gpu: Any) -> None:
    parts = gpu("gpu.parts")
    page = (BENCH / "README.md").read_text().partition("## On a GPU")[2]
    for group in parts.commands(parts.PARTS):
        letter = group[-1].letter
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {letter} |")]
        needed = {name for part in group for name in part.needs}
        spared = sum(part.seconds for part in group if part.name in needed)
        figures = [f"{sum(part.seconds for part in group):.0f} s", f"{spared:.0f} s"]
        assert [cell.strip() for cell in row.split("|")[3:5]] == [
            figures[0],
            figures[1] if spared else "",
        ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", "h"], "part 'h' is unknown; allowed: a, b, c, d, e, f, g, micro_lanes"),
        (["report", "a"], "part 'report' is unknown; allowed: a, b"),
        (["oversubscription"], "can hang a GPU: only with --allow-oversubscription"),
    ],
)
def test_parts_that_may_not_run_are_refused(
    gpu: Any, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu("gpu.run").main([*words, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_the_folder_of_the_results_has_to_be_named(
    gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu("gpu.run").main(["a"])
    assert "--out" in capsys.readouterr().err


def test_oversubscription_is_off_unless_it_is_allowed(gpu: Any) -> None:
    parts = gpu("gpu.parts")
    assert parts.BEYOND not in parts.choose([], False)
    assert parts.choose([], True)[-1] == parts.BEYOND
    assert parts.choose(["oversubscription"], True) == [parts.BEYOND]


def test_what_is_done_is_not_repeated_and_what_failed_is(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, record, parts = gpu("gpu.run"), gpu("gpu.record"), gpu("gpu.parts")
    for name, status in (("sizing", record.DONE), ("micro_bandwidth", record.FAILED)):
        record.Record(name, tmp_path / f"{name}.json", status=status).save()
    started: list[str] = []

    def child(arguments: list[str], setup: object, timeout: float) -> int:
        started.append(arguments[0])
        path = tmp_path / f"{arguments[0]}.json"
        assert record.load(path).about == {"date": "today"}  # the process adds to this record
        record.Record(arguments[0], path, status=record.DONE).save()
        return 0

    monkeypatch.setattr(run, "_child", child)
    setup = run.Setup(tmp_path, GIB, "cache", {"date": "today"})
    (group,) = parts.commands(parts.choose(["d"], False))
    records = run.run_parts(group, setup)
    assert started == ["micro_bandwidth", "outofcore"]
    assert [each.status for each in records] == [record.DONE] * 3
    run.run_parts(group, setup)
    assert started == ["micro_bandwidth", "outofcore"]


@pytest.mark.parametrize(
    ("ended", "words"), [(None, "did not end within 256 s"), (-11, "died: exit code -11")]
)
def test_a_part_that_dies_is_recorded_with_what_it_had(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int | None, words: str
) -> None:
    run, record, parts = gpu("gpu.run"), gpu("gpu.record"), gpu("gpu.parts")

    def child(arguments: list[str], setup: object, timeout: float) -> int | None:
        found = record.load(tmp_path / f"{arguments[0]}.json")
        found.add("copy", [1.0], "ms")
        found.save()
        return ended

    monkeypatch.setattr(run, "_child", child)
    setup = run.Setup(tmp_path, GIB, "cache")
    one = replace(parts.BY_NAME["maxbatch"], measuring=128 - 2 * parts.START)
    dead = run.run_parts([one], setup)[0]
    assert dead.status == record.FAILED
    assert words in dead.errors["part"]
    assert len(dead.results) == 1
    assert record.load(tmp_path / "maxbatch.json").status == record.FAILED


def test_a_slow_part_leaves_the_later_ones_their_time(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, parts = gpu("gpu.run"), gpu("gpu.parts")
    now, limits = [0.0], []

    def child(arguments: list[str], setup: object, timeout: float) -> None:
        limits.append(timeout)
        now[0] += timeout  # each has to be killed

    monkeypatch.setattr(run, "_child", child)
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    (group,) = parts.commands(parts.choose(["d"], False))
    run.run_parts(group, run.Setup(tmp_path, GIB, "cache"))
    assert sum(limits) <= parts.LONGEST
    assert all(limit >= part.seconds for limit, part in zip(limits, group, strict=True))


def found(**changed: Any) -> dict[str, Any]:
    return {"gpu": "Some GPU 80GB", "software": False, "gpu_free_bytes": GIB, **changed}


def test_prepare_measures_nothing(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = gpu("gpu.run")
    monkeypatch.setattr(run, "_prepare", lambda _: found())
    monkeypatch.setattr(run, "_child", lambda *_, **__: pytest.fail("a part was started"))
    assert run.main(["prepare", "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("facts", "said"),
    [(None, "cannot run here"), (found(software=True), "only --smoke runs")],
)
def test_without_a_gpu_nothing_is_measured(
    gpu: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    facts: dict[str, Any] | None,
    said: str,
) -> None:
    run = gpu("gpu.run")
    monkeypatch.setattr(run, "_prepare", lambda _: facts)
    assert run.main(["a", "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_results_of_another_device_stay_apart(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, record = gpu("gpu.run"), gpu("gpu.record")
    (tmp_path / "gpu-parts").mkdir()
    for name, device in (("fits", "one"), ("peak", "another")):
        about = {"machine": {"gpu": device}}
        record.Record(name, tmp_path / "gpu-parts" / f"{name}.json", about=about).save()
    monkeypatch.setattr(run, "_prepare", lambda _: found())
    assert run.main(["a", "--out", str(tmp_path)]) == 2
    assert "name another folder" in capsys.readouterr().err
    assert run.main(["report", "--out", str(tmp_path)]) == 2
    assert "several devices or commits" in capsys.readouterr().err


def test_a_process_needs_no_time_of_the_measurements_to_start(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, children = gpu("gpu.context"), gpu("gpu.children")
    now = [0.0]
    specs = []

    @contextlib.contextmanager
    def worker(_: object, spec: Any) -> Iterator[str]:
        specs.append(spec)
        now[0] += 30 * SECOND
        yield "process"

    monkeypatch.setattr(children, "worker", worker)
    deadline = gpu("gpu.deadline").Deadline(10 * SECOND, lambda: now[0])
    guard, record = gpu("gpu.guard").Guard(GIB), gpu("gpu.record").Record("fits")
    config = gpu("gpu.config").SMOKE
    made = module.Context(guard, record, config, deadline, tmp_path, "cache")
    with made.worker(children.GpuSpec("gpt2", budget=GIB)) as process:
        assert process == "process"
        assert deadline.left == 10 * SECOND
    (spec,) = specs
    assert (spec.policy, spec.torch_ext_cache) == ("auto", "cache")


def test_a_part_that_raises_keeps_its_record(gpu: Any, tmp_path: Path) -> None:
    part, parts, context = gpu("gpu.part"), gpu("gpu.parts"), gpu("gpu.context")
    record = gpu("gpu.record").Record("fits", tmp_path / "fits.json")
    made = context.Context(
        gpu("gpu.guard").Guard(GIB),
        record,
        replace(gpu("gpu.config").SMOKE, workloads=None),
        gpu("gpu.deadline").Deadline(60),
        tmp_path,
    )
    assert part.measure(parts.BY_NAME["fits"], made) == 1
    read = json.loads((tmp_path / "fits.json").read_text())
    assert read["status"] == "failed"
    assert "TypeError" in read["errors"]["part"]


def test_a_training_part_needs_the_sizes_and_the_link_measured(gpu: Any, tmp_path: Path) -> None:
    sizing, outofcore, context = gpu("gpu.sizing"), gpu("gpu.outofcore"), gpu("gpu.context")
    config, record = gpu("gpu.config").Config(), gpu("gpu.record")
    made = context.Context(
        gpu("gpu.guard").Guard(GIB),
        record.Record("outofcore"),
        config,
        gpu("gpu.deadline").Deadline(60),
        tmp_path,
    )
    sized = {"workload": "gpt2", "peak": 5, "step_ms": 1.0, "software": False}
    details = {"sized": dict.fromkeys(config.workloads[1:], sized)}
    record.Record("sizing", tmp_path / "sizing.json", details=details).save()
    with pytest.raises(RuntimeError, match="sizing has no size of resnet50"):
        sizing.known(made)
    details["sized"][config.workloads[0]] = sized
    record.Record("sizing", tmp_path / "sizing.json", details=details).save()
    assert list(sizing.known(made)) == list(config.workloads)
    with pytest.raises(RuntimeError, match="micro_bandwidth has no bandwidths"):
        outofcore.measured_link(made)
    details = {"bandwidth": {"in": 2, "out": 1}}
    record.Record("x", tmp_path / "micro_bandwidth.json", details=details).save()
    assert outofcore.measured_link(made) == {"in": 2.0, "out": 1.0}


def test_the_lines_of_a_program_are_its_answers_until_it_ended(gpu: Any) -> None:
    parse = gpu("gpu.neighbours")._parse
    assert parse("noise\npool\tyes, both\nother\tno\ncudnn_b") == {"pool": "yes, both"}


# --- the floor, by hand ----------------------------------------------------------------------


def step_of(
    gpu: Any, ops: list[tuple[float, list[int]]], sizes: list[int], **sets: list[int]
) -> Any:
    floor = gpu("gpu.floor")
    traced = {"ops": ops, "sizes": sizes, "persistent": [], "written": [], **sets}
    return floor.Step.of(traced, sum(seconds for seconds, _ in ops))


def test_the_floor_is_the_compute_time_when_everything_fits(gpu: Any) -> None:
    step = step_of(gpu, [(1.0, [0]), (2.0, [1]), (1.0, [0])], [100, 50])
    assert gpu("gpu.floor").cuts(step).peak == 150
    assert gpu("gpu.floor").closed_form_floor(step, 150, 1.0, 1.0) == 4.0


def test_an_activation_leaves_before_the_peak_and_returns_after_it(gpu: Any) -> None:
    # 0 is made by op 0 and used by op 2; op 1 needs 50 beside it: 50 bytes are too many.
    step = step_of(gpu, [(1.0, [0]), (2.0, [1]), (1.0, [0])], [100, 50], written=[0, 1])
    floor = gpu("gpu.floor").closed_form_floor
    # out in max(1 s, 50/10), in in max(1 s, 50/25); the steady state needs 5 s of out.
    assert floor(step, 100, 25.0, 10.0) == 5.0 + 2.0
    # A link so fast that computing hides it.
    assert floor(step, 100, 1000.0, 1000.0) == 4.0


def test_weights_that_only_the_next_step_wants_need_no_way_back(gpu: Any) -> None:
    # The weight 0 is used by op 0, read only; op 1 needs all 100 bytes for itself.
    ops = [(1.0, [0]), (3.0, [1]), (1.0, [2])]
    floor = gpu("gpu.floor")
    kept = step_of(gpu, ops, [40, 100, 10], persistent=[0], written=[1, 2])
    cuts = floor.cuts(kept)
    assert (cuts.spanning, cuts.persistent) == ([0, 40, 40], [0, 40, 40])
    assert (cuts.next_step, cuts.unwritten) == ([0, 40, 40], [0, 40, 40])
    # Neither direction is charged in this step, but the steady state brings 40 bytes in each step.
    assert floor.closed_form_floor(kept, 100, 10.0, 1.0) == 5.0
    assert floor.closed_form_floor(kept, 100, 2.0, 1.0) == 20.0
    # Written, as in an optimizer, it must leave too.
    updated = step_of(gpu, ops, [40, 100, 10], persistent=[0], written=[0, 1, 2])
    assert floor.closed_form_floor(updated, 100, 10.0, 1.0) == 40.0


def test_a_persistent_tensor_first_used_after_the_peak_has_to_come_in(gpu: Any) -> None:
    step = step_of(gpu, [(2.0, [1]), (1.0, [0])], [60, 100], persistent=[0], written=[1])
    floor = gpu("gpu.floor")
    cuts = floor.cuts(step)
    assert (cuts.persistent, cuts.next_step) == ([60, 0], [0, 0])
    # At op 0: over by 60, all persistent: nothing out; 60/10 s in after it, and 0 s before it.
    assert floor.closed_form_floor(step, 100, 10.0, 1.0) == 6.0


def test_a_link_of_no_speed_is_refused(gpu: Any) -> None:
    step = step_of(gpu, [(1.0, [0])], [1])
    with pytest.raises(ValueError, match="above 0"):
        gpu("gpu.floor").closed_form_floor(step, 1, 0.0, 1.0)


def test_traced_times_are_scaled_to_the_measured_step(gpu: Any) -> None:
    floor = gpu("gpu.floor")
    traced = {"ops": [(1.0, [0]), (3.0, [0])], "sizes": [1], "persistent": [], "written": []}
    assert [op.seconds for op in floor.Step.of(traced, 2.0).ops] == [0.5, 1.5]
    silent = {**traced, "ops": [(0.0, [0]), (0.0, [0])]}  # a device whose events tell nothing
    assert [op.seconds for op in floor.Step.of(silent, 2.0).ops] == [1.0, 1.0]


# --- small decisions -------------------------------------------------------------------------


def test_the_lane_model_is_the_line_through_its_points(gpu: Any) -> None:
    line = gpu("gpu.micro_bandwidth").line
    points = {("in", size): [1e-3 + size * 1e-9] * 3 for size in (MIB, 16 * MIB, GIB)}
    overhead, slope = line("in", points | {("out", MIB): [9.0]})
    assert overhead == pytest.approx(1e-3)
    assert slope == pytest.approx(1e-9)
    assert line("out", {("out", 4): [8.0]}) == (0.0, 2.0)


def test_the_hidden_share_is_of_the_shorter_work(gpu: Any) -> None:
    hidden = gpu("gpu.micro_overlap").hidden_share
    assert hidden(3.0, 1.0, 3.0) == 1.0
    assert hidden(3.0, 1.0, 4.0) == 0.0
    assert hidden(3.0, 2.0, 4.0) == 0.5


@pytest.mark.parametrize(("most", "found"), [(3, None), (8, 8), (40, 32), (1000, 64)])
def test_the_largest_batch_is_found(gpu: Any, most: int, found: int | None) -> None:
    deadline = gpu("gpu.deadline").Deadline(60)
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= most

    assert gpu("gpu.maxbatch").largest((8, 16, 32, 64), fits, deadline) == found
    assert len(tried) <= 3


@pytest.mark.parametrize(
    ("each", "batches"), [(MIB, [128]), (10 * MIB, [128, 73]), (400 * MIB, [128, 1])]
)
def test_a_batch_is_reduced_until_its_peak_fits(gpu: Any, each: int, batches: list[int]) -> None:
    sizing, tried = gpu("gpu.sizing"), []

    def attempt(text: str) -> Any:
        batch = gpu("gpu.workloads").lookup(text).batch
        tried.append(batch)
        return sizing.Sized(text, batch * each, 1.0, False)

    sized = sizing.fit("resnet50", gpu("gpu.guard").Guard(GIB), attempt)
    assert (tried, sized.peak) == (batches, batches[-1] * each)
    with pytest.raises(gpu("gpu.guard").GuardError, match="use one with more free memory"):
        sizing.fit("resnet50", gpu("gpu.guard").Guard(MIB), attempt)


def test_another_batch_keeps_the_other_settings(gpu: Any) -> None:
    with_batch = gpu("gpu.sizing").with_batch
    assert with_batch("resnet50", 4) == "resnet50:batch=4"
    assert with_batch("resnet50:batch=8,width=16", 4) == "resnet50:width=16,batch=4"


def test_losses_are_compared_only_where_plain_torch_repeats_its_own(gpu: Any) -> None:
    same = gpu("gpu.peak").same_losses
    assert same([1.0, 2.0], [1.0, 2.0], [1.0, 2.0]) == "the losses are plain torch's, bit by bit"
    assert same([1.0, 2.0], [1.0, 2.0], [1.0, 2.5]) == "the losses DIFFER"
    assert same([1.0, 2.0], [1.0, 2.1], [1.0, 2.0]).startswith("losses not comparable")


# --- workloads and techniques ----------------------------------------------------------------

TINY = (
    "resnet50:width=8,blocks=1x1x1x1,image=32,batch=4,classes=4",
    "vgg16:width=4,image=32,batch=4,classes=4",
    "unet:width=4,levels=2,image=32,batch=2",
    "gpt2:layers=2,dim=32,heads=2,context=32,vocabulary=100,batch=2",
)


@pytest.mark.parametrize("text", TINY)
def test_large_workloads_train_repeat_and_checkpoint_the_same(gpu: Any, text: str) -> None:
    torch = pytest.importorskip("torch", reason="the workloads are torch's")
    workloads = gpu("gpu.workloads")
    torch.set_num_threads(1)
    config = replace(workloads.lookup(text), amp=False)
    plain = workloads.build(config)
    losses = [plain.step() for _ in range(3)]
    again = workloads.build(config)
    undo = gpu("gpu.techniques").use(again, "checkpoint")
    assert [again.step() for _ in range(3)] == losses
    undo()
    assert again.step() == pytest.approx(plain.step(), rel=1e-3)
    assert torch.isfinite(torch.tensor(losses)).all()


def test_the_published_networks_have_their_parameters(gpu: Any) -> None:
    torch = pytest.importorskip("torch", reason="the networks are torch's")
    nets = gpu("nets")
    with torch.device("meta"):
        resnet = nets.ResNet50(64, (3, 4, 6, 3), 1000)
        vgg = nets.VGG16(64, 224, 1000)
    assert sum(p.numel() for p in resnet.parameters()) == 25_557_032
    # VGG-16 with normalisation has 138 365 992; these convolutions have no bias.
    assert sum(p.numel() for p in vgg.parameters()) == 138_365_992 - 4_224


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("resnet50:depth=3", "no setting 'depth'; allowed: width, blocks"),
        ("resnet50:batch=many", "batch='many' is not of type int; allowed: as in batch=128"),
        ("resnet50:blocks=3,4", "no setting '4'"),
        ("resnet:batch=4", "'resnet' is unknown; allowed: resnet50, gpt2, unet, vgg16"),
    ],
)
def test_bad_settings_of_a_workload_are_refused(gpu: Any, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        gpu("gpu.workloads").lookup(text)


# --- the report ------------------------------------------------------------------------------


def recorded(gpu: Any, facts: dict[str, Any] | None = None) -> list[Any]:
    record = gpu("gpu.record")
    about = {
        "machine": {**(facts or found()), "smoke": False},
        "versions": {"commit": "0" * 40},
        "date": "2026-11-22T10:00:00+00:00",
    }
    bandwidth = record.Record("micro_bandwidth", about=about, status=record.DONE, seconds=12.0)
    bandwidth.add("prefetch in, 64 MiB", [20.0, 21.0, 22.0], "GB/s")
    bandwidth.decide("4", "is prefetch as fast as a pinned copy?", "in: 90 % | out: 80 %")
    bandwidth.details["rates"] = {"prefetch in": [[2 * MIB, 10.0], [64 * MIB, 21.0]]}
    errors = {"d unet": "it died"}
    training = record.Record("outofcore", about=about, status=record.FAILED, errors=errors)
    step = {"median": 200.0, "low": 190.0, "high": 210.0, "count": 3}
    rows = [
        {"way": "plain", "fraction": None, "step": {**step, "median": 90.0}, "floor_ms": None},
        {"way": "lru", "fraction": 1.0, "step": {**step, "median": 91.0}, "floor_ms": 90.0},
        {"way": "lru", "fraction": 0.5, "step": step, "floor_ms": 180.0},
        {"way": "none", "fraction": 0.5, "step": None, "floor_ms": 180.0},
    ]
    training.details["outofcore"] = {"resnet50": {"rows": rows}}
    training.details["not_measured"] = {"resnet50, none at 0.5 of the peak": "no time"}
    training.add("resnet50, lru at 0.5, to the floor", [1.3], "x", target=1.25)
    return [bandwidth, training]


def test_the_report_has_decisions_figures_errors_and_pictures(gpu: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the pictures")
    report = gpu("gpu.report")
    data, text, *drawn = report.write(recorded(gpu), tmp_path)
    assert data.name == "gpu_some-gpu-80gb_2026-11-22.json"
    assert [path.suffix for path in drawn] == [".png", ".png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    page = text.read_text()
    assert "| 4 | is prefetch as fast as a pinned copy? | in: 90 % / out: 80 % |" in page
    assert "| outofcore: Not everything fits | **failed** | 0 | d unet: it died |" in page
    assert "| d | Not everything fits | failed: outofcore: d unet: it died |" in page
    assert "- resnet50, none at 0.5 of the peak: no time" in page
    assert "| <= 1.25 x | **no** |" in page
    assert f"![{drawn[0].name}]({drawn[0].name})" in page
    assert "software driver" not in page
    read = json.loads(data.read_text())
    assert read["details"]["micro_bandwidth"]["details"]["values"] == {
        "prefetch in, 64 MiB": [20.0, 21.0, 22.0]
    }


def test_on_the_software_driver_no_figure_is_judged(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # and without pictures
    report = gpu("gpu.report")
    paths = report.write(recorded(gpu, found(gpu="umem softcuda 0", software=True)), tmp_path)
    page = paths[1].read_text()
    assert len(paths) == 2
    assert "not comparable on the software driver" in page
    assert "<= 1.25" not in page
    assert "No pictures: matplotlib is not installed" in page


def test_the_summary_says_of_each_letter_whether_it_ran(gpu: Any) -> None:
    report, parts, record = gpu("gpu.report"), gpu("gpu.parts"), gpu("gpu.record")
    a, b, e = (
        [record.Record(part.name, status=record.DONE) for part in parts.choose([letter], False)]
        for letter in "abe"
    )
    e[0].leave_out("e vgg16", record.TIME_USED_UP)
    interrupted = record.Record("fits")
    rows = {letter: outcome for letter, _, outcome in report.summary([*a, *b[1:], interrupted, *e])}
    assert rows == {
        "a": "ran",
        "b": "not run: micro_bandwidth",
        "c": "failed: fits: it was interrupted; not run: sizing",
        "d": "not run",
        "e": f"1 not measured: {record.TIME_USED_UP}",
        "f": "not run",
        "g": "not run",
    }


def test_records_of_several_commands_are_joined(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = gpu("gpu.run")
    assert run.main(["report", "--out", str(tmp_path)]) == 2
    assert "has no results" in capsys.readouterr().err
    (tmp_path / "gpu-parts").mkdir()
    bandwidth, training = recorded(gpu)
    for record in (bandwidth, training):
        record.path = tmp_path / "gpu-parts" / f"{record.part}.json"
        record.save()
    assert run.main(["report", "--out", str(tmp_path)]) == 1  # one of them failed
    assert "| d | Not everything fits | failed: outofcore" in capsys.readouterr().out
    report = json.loads((tmp_path / "gpu_some-gpu-80gb_2026-11-22.json").read_text())
    assert report["versions"] == {"commit": "0" * 40}
    assert set(report["details"]) >= {"micro_bandwidth", "outofcore"}


def test_a_row_says_what_its_steps_moved_and_how_many_ops_went_by_a_plan(gpu: Any) -> None:
    module, spread = gpu("gpu.outofcore"), gpu("harness").Spread
    names = ("bytes_in", "bytes_out", "plan_hits", "plan_misses")
    before = dict(zip(names, (MIB, MIB, 5, 5), strict=True))
    after = dict(zip(names, (5 * MIB, 3 * MIB, 14, 6), strict=True))
    row = module.Row("auto", 0.5, GIB, spread.of([1.0, 2.0]))
    row.count(before, after)
    assert row.note == "1 GiB, 2 MiB in, 1 MiB out a step, 90% of the ops by a plan"
    assert module.Row("plain", None, GIB, spread.of([1.0])).note == "1 GiB"
    row.count(after, after)
    assert (row.note, row.planned) == ("1 GiB", 0.0)


def test_the_verdict_names_the_best_policy_at_each_budget(gpu: Any) -> None:
    module, spread = gpu("gpu.outofcore"), gpu("harness").Spread
    rows = [
        module.Row("plain", None, 10, spread.of([100.0])),
        module.Row("checkpoint", None, 6, spread.of([150.0])),
        module.Row("lru", 0.5, 5, spread.of([300.0]), 200.0),
        module.Row("conv_lru", 0.5, 5, spread.of([240.0]), 200.0),
        module.Row("none", 0.25, 2, None, 400.0, "the time was used up"),
    ]
    assert module.verdict(rows) == (
        "0.5: conv_lru takes 1.20x the floor, 2.40x plain, 1.60x checkpoint; 0.25: not measured"
    )
