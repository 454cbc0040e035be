"""The GPU bench without a GPU: guard, deadlines, records, parts, the floor, the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.benches import imports

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
    assert [part.name for part in parts.choose("e, b,sizing", False)] == ["sizing", "fits", "peak"]
    assert {part.letter for part in parts.choose("a", False)} == {"a"}
    assert parts.choose(None, False) == list(parts.PARTS)


def test_all_parts_have_a_module_and_end_within_8_minutes(gpu: Any) -> None:
    parts = gpu("gpu.parts")
    assert sum(part.seconds for part in parts.PARTS) <= parts.LONGEST == 8 * 60
    for part in parts.BY_NAME.values():
        assert callable(part.load().run)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,f", "part 'f' is unknown; allowed: a, b, c, d, e, micro_gates"),
        ("", "no part is named"),
        ("oversubscription", "can hang a GPU: only with --allow-oversubscription"),
    ],
)
def test_parts_that_may_not_run_are_refused(
    gpu: Any, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu("gpu.run").main(["--parts", text]) == 2
    assert words in capsys.readouterr().err


def test_oversubscription_is_off_unless_it_is_allowed(gpu: Any) -> None:
    parts = gpu("gpu.parts")
    assert parts.BEYOND not in parts.choose(None, False)
    assert parts.choose(None, True)[-1] == parts.BEYOND
    assert parts.choose("oversubscription", True) == [parts.BEYOND]


def test_resume_skips_what_is_done_and_repeats_what_failed(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, record, parts = gpu("gpu.run"), gpu("gpu.record"), gpu("gpu.parts")
    chosen = parts.choose("b,c,d", False)
    for name, status in (("fits", record.DONE), ("outofcore", record.FAILED)):
        record.Record(name, tmp_path / f"{name}.json", status=status).save()
    started: list[str] = []

    def child(arguments: list[str], setup: object, timeout: float) -> int:
        started.append(arguments[0])
        record.Record(arguments[0], tmp_path / f"{arguments[0]}.json", status=record.DONE).save()
        return 0

    monkeypatch.setattr(run, "_child", child)
    setup = run.Setup(tmp_path, GIB, "cache", resume=True)
    records = run.run_parts(chosen, setup, 480 * SECOND)
    assert started == ["outofcore", "maxbatch"]
    assert [each.status for each in records] == [record.DONE] * 3
    run.run_parts(chosen, replace(setup, resume=False), 480 * SECOND)
    assert started == ["outofcore", "maxbatch", "fits", "outofcore", "maxbatch"]


@pytest.mark.parametrize(
    ("ended", "words"), [(None, "did not end within 40 s"), (-11, "died: exit code -11")]
)
def test_a_part_that_dies_is_recorded_with_what_it_had(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int | None, words: str
) -> None:
    run, record, parts = gpu("gpu.run"), gpu("gpu.record"), gpu("gpu.parts")

    def child(arguments: list[str], setup: object, timeout: float) -> int | None:
        found = record.Record(arguments[0], tmp_path / f"{arguments[0]}.json")
        found.add("copy", [1.0], "ms")
        found.save()
        return ended

    monkeypatch.setattr(run, "_child", child)
    setup = run.Setup(tmp_path, GIB, "cache")
    dead = run.run_parts(parts.choose("d,e", False), setup, 40 * SECOND)
    assert dead[0].status == record.FAILED
    assert words in dead[0].errors["part"]
    assert len(dead[0].results) == 1
    late = run.run_parts(parts.choose("e", False), setup, 1 * SECOND)[0]
    assert late.errors == {"part": "no time was left for it"}
    assert record.load(tmp_path / "peak.json").status == record.FAILED


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
    # Written, as by an optimizer, it has to go out too.
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


def recorded(gpu: Any) -> list[Any]:
    record = gpu("gpu.record")
    bandwidth = record.Record("micro_bandwidth", status=record.DONE, seconds=12.0)
    bandwidth.add("prefetch in, 64 MiB", [20.0, 21.0, 22.0], "GB/s")
    bandwidth.decide("4", "is prefetch as fast as a pinned copy?", "in: 90 % | out: 80 %")
    bandwidth.details["rates"] = {"prefetch in": [[2 * MIB, 10.0], [64 * MIB, 21.0]]}
    training = record.Record("outofcore", status=record.FAILED, errors={"c unet": "it died"})
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


FACTS = {"gpu": "Some GPU 80GB", "software": False, "gpu_free_bytes": GIB}


def test_the_report_has_decisions_figures_errors_and_pictures(gpu: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the pictures")
    report = gpu("gpu.report")
    paths = report.write(recorded(gpu), FACTS, gpu("gpu.config").Config(), tmp_path)
    data, text, *drawn = paths
    assert data.name.startswith("gpu_some-gpu-80gb_")
    assert [path.suffix for path in drawn] == [".png", ".png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    page = text.read_text()
    assert "| 4 | is prefetch as fast as a pinned copy? | in: 90 % / out: 80 % |" in page
    assert "| outofcore: Not everything fits | **failed** | 0 | c unet: it died |" in page
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
    facts = {**FACTS, "gpu": "umem softcuda 0", "software": True}
    paths = report.write(recorded(gpu), facts, gpu("gpu.config").SMOKE, tmp_path)
    page = paths[1].read_text()
    assert len(paths) == 2
    assert "not comparable on the software driver" in page
    assert "<= 1.25" not in page
    assert "No pictures: matplotlib is not installed" in page


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
