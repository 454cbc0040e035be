"""The GPU bench without a GPU: guard, deadlines, records, parts, trainings, the report."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.benches import BENCH, imports

from umem.base.units import GIB, MIB

ABOUT: dict[str, Any] = {
    "machine": {"gpu": "Some GPU 80GB", "software": False, "smoke": False},
    "versions": {"commit": "0" * 40},
    "date": "2026-11-22T10:00:00+00:00",
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of bench/gpu, or of bench, as its scripts do."""
    yield from imports(monkeypatch, "gpu")


@pytest.mark.parametrize(
    ("free", "limit"),
    [(80 * GIB, 20 * GIB), (200 * GIB, 32 * GIB), (9 * MIB, 2 * MIB), (GIB + 3, 256 * MIB)],
)
def test_the_limit_is_a_quarter_of_what_is_free_and_32_gib(gpu: Any, free: int, limit: int) -> None:
    assert gpu("gpu.record").limit_bytes(free) == limit


def test_the_guard_refuses_what_exceeds_the_limit_in_sum(gpu: Any) -> None:
    module = gpu("gpu.record")
    guard = module.Guard(10 * MIB)
    with pytest.raises(KeyError), guard.share(10 * MIB, "all of it, to the byte"):
        raise KeyError  # it is given back all the same
    with guard.share(6 * MIB, "one"):
        refused = r"two needs 5 MiB; allowed: 10 MiB of managed memory, 6 MiB of which are in use"
        with pytest.raises(module.GuardError, match=refused), guard.share(5 * MIB, "two"):
            pass
        with pytest.raises(module.GuardError), guard.share(0, "nothing"):
            pass
    assert (guard.held, guard.peak) == (0, 10 * MIB)


def test_rounds_end_with_the_time_but_one_always_runs(gpu: Any) -> None:
    now = [0.0]
    deadline = gpu("gpu.record").Deadline(10.0, lambda: now[0])
    done = []
    for i in deadline.rounds(5):
        done.append(i)
        now[0] += 4.0
    assert done == [0, 1, 2]  # the fourth would start at 12 s
    assert list(deadline.rounds(3)) == [0]


def test_an_item_that_fails_is_kept_and_the_next_one_runs(gpu: Any, tmp_path: Path) -> None:
    module = gpu("gpu.record")
    record, deadline = module.Record("calls", tmp_path / "calls.json"), module.Deadline(60.0)

    def fail(error: Exception) -> None:
        raise error

    record.take(
        {
            "wrong": lambda: fail(ZeroDivisionError("of course")),
            "lacking": lambda: fail(module.CallError("cuMemDiscardBatchAsync", 500)),
            "broken": lambda: fail(module.CallError("cuMemFree", 700)),
            "right": lambda: record.add("copy", [1.0, 2.0, 3.0], "GB/s"),
        },
        deadline,
    )
    record.take({"late": lambda: pytest.fail("too late")}, module.Deadline(0.0))
    read = module.load(tmp_path / "calls.json")
    assert read.errors == {
        "wrong": "ZeroDivisionError: of course",
        "broken": "CallError: cuMemFree returned CUresult 700",
    }
    assert read.details["not_measured"] == {
        "lacking": "this driver cannot: cuMemDiscardBatchAsync returned CUresult 500",
        "late": "the part's time was used up",
    }
    assert "in fail" in read.details["tracebacks"]["wrong"]
    assert read.results == record.results
    assert read.results[0].spread.median == 2.0
    read.path.write_text('{"results": [{}]}')
    assert module.load(read.path) is None


def test_every_letter_ends_within_8_minutes_as_the_readme_says(gpu: Any) -> None:
    parts = gpu("gpu.parts")
    page = (BENCH / "README.md").read_text().partition("## On a GPU")[2]
    for letter in parts.LETTERS:
        seconds = sum(part.seconds for part in parts.PARTS if part.letter == letter)
        assert seconds <= parts.LONGEST == 8 * 60
        assert f"- **{letter}** ({seconds:.0f} s): " in page
    for part in parts.PARTS:
        module, _, function = part.run.partition(".")
        assert callable(getattr(gpu(f"gpu.{module}"), function))


def arguments(out: Path, **changed: Any) -> argparse.Namespace:
    (out / "gpu-parts").mkdir()
    given = {"out": out, "cache": "cache", "smoke": False, "child": GIB, "seconds": 60.0}
    return argparse.Namespace(**given | changed)


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (0, None),
        (None, "the process took too long and was killed"),
        (-11, "the process died: exit code -11"),
    ],
)
def test_a_part_that_dies_keeps_what_it_had_and_runs_again(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int | None, said: str | None
) -> None:
    run, module, part = gpu("gpu.run"), gpu("gpu.record"), gpu("gpu.parts").PARTS[1]
    path, started = tmp_path / "gpu-parts" / f"{part.name}.json", []

    def child(command: list[str], environment: dict[str, str], seconds: float) -> int | None:
        started.append(command)
        assert environment["UMEM_GUARD"] == "1"
        assert command[command.index("--child") + 1] == str(GIB)
        assert seconds == part.seconds
        record = module.load(path)
        assert record.about == ABOUT  # the process adds to this record
        record.add("copy", [1.0], "ms")
        record.save()
        return ended

    monkeypatch.setattr(run, "_run", child)
    args = arguments(tmp_path)
    for _ in range(2):
        run.run_part(part, args, GIB, ABOUT)
    record = module.load(path)
    assert record.errors == ({} if said is None else {"part": said})
    assert len(record.results) == 1
    assert len(started) == (1 if said is None else 2)  # what is done is not run again


def test_a_process_that_hangs_is_killed_with_its_children(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, pid = gpu("gpu.run"), tmp_path / "pid"
    monkeypatch.setattr(run, "GRACE", 2.0)
    command = ["sh", "-c", f"sleep 600 & echo $! > {pid}; wait"]
    assert run._run(command, {"PATH": "/bin"}, 0.0) is None
    process = Path("/proc", pid.read_text().strip(), "stat")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may be a zombie for good
        for _ in range(3000):
            if process.read_text().split()[2] == "Z":
                break
            time.sleep(0.01)
        else:
            pytest.fail("it was not killed")
    assert run._run([sys.executable, "-c", "raise SystemExit(3)"], {}, 60.0) == 3


def test_a_part_that_raises_keeps_its_record(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, module = gpu("gpu.run"), gpu("gpu.record")
    monkeypatch.setenv("SOFTCUDA_LIB", str(tmp_path))  # without a driver
    args = arguments(tmp_path, what=["ways"])
    module.Record("ways", tmp_path / "gpu-parts" / "ways.json", ABOUT).save()
    assert run.child(args) == 0
    record = module.load(tmp_path / "gpu-parts" / "ways.json")
    assert "there is no libcudart.so.13" in record.errors["part"]
    assert record.details["managed_peak_bytes"] == 0


def test_what_cannot_be_measured_is_refused(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, module = gpu("gpu.run"), gpu("gpu.record")
    facts = {**ABOUT["machine"], "gpu_free_bytes": GIB, "umem": "ready"}
    monkeypatch.setattr(run, "output_of", lambda *_, **__: json.dumps(facts))
    monkeypatch.setattr(run, "run_part", lambda *_: pytest.fail("a part was started"))
    words = ["a", "--out", str(tmp_path)]
    assert run.main(["prepare", *words[1:]]) == 0
    with pytest.raises(SystemExit, match="has no results"):
        run.main(["report", *words[1:]])
    module.Record("ways", tmp_path / "gpu-parts" / "ways.json", ABOUT).save()
    with pytest.raises(SystemExit, match="another device or commit"):
        run.main(words)  # this tree's commit
    facts["software"] = True
    with pytest.raises(SystemExit, match="only --smoke runs"):
        run.main(words)


class Process:
    """A training in place of a process: `digests` are its weights after each `train`."""

    def __init__(self, digests: list[str] | None = None) -> None:
        self.digests = digests or []
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, command: str, **options: Any) -> dict[str, Any]:
        self.calls.append((command, options))
        did = {"bytes_in": MIB, "bytes_out": MIB, "plan_hits": 9, "plan_misses": 1, "evictions": 2}
        answers = {"ms": [200.0] * options.get("steps", 0), "did": did, "bytes": 400 * MIB}
        return {**answers, "sha256": self.digests.pop(0) if command == "digest" else ""}


def bench_of(gpu: Any, tmp_path: Path, part: str) -> Any:
    parts, record = gpu("gpu.parts"), gpu("gpu.record")
    (found,) = [one for one in parts.PARTS if one.name == part]
    made = record.Record(part, tmp_path / f"{part}.json", ABOUT)
    config, deadline = parts.Config(fits=("net",), bits=("net",)), record.Deadline(60.0)
    return parts.Bench(found, made, config, deadline, record.Guard(GIB), "cache")


def test_every_training_has_umems_own_guard_and_budgets_that_sum_to_the_limit(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings = gpu("gpu.trainings")
    seen: dict[str, Any] = {}
    monkeypatch.setenv("UMEM_GUARD", "0")
    monkeypatch.setenv("UMEM_POLICY", "none")

    def start(spec: Any, environment: dict[str, str], **_: object) -> Any:
        seen.update(environment, budget=spec.budget)
        return contextlib.nullcontext("process")

    monkeypatch.setattr(trainings, "WorkerProcess", start)
    bench = bench_of(gpu, tmp_path, "fits")
    with trainings.training(bench, "net", "lru"):
        assert bench.guard.held == GIB
        with pytest.raises(gpu("gpu.record").GuardError), trainings.training(bench, "x", "lru"):
            pass
    assert {name: text for name, text in seen.items() if name.startswith("UMEM_")} == {
        "UMEM_TORCH_EXT_CACHE": "cache",
        "UMEM_GUARD": "1",
        "UMEM_BACKING": "managed",
        "UMEM_BUDGET": str(GIB // 2),
        "UMEM_HOST_BUDGET": str(GIB // 2),
    }
    assert seen["budget"] == GIB // 2


def trained(gpu: Any, monkeypatch: pytest.MonkeyPatch, bench: Any, run: str, *made: Process) -> Any:
    trainings, left = gpu("gpu.trainings"), list(made)
    start = lambda *_, **__: contextlib.nullcontext(left.pop(0) if left else Process())  # noqa: E731
    monkeypatch.setattr(trainings, "training", start)
    getattr(trainings, run)(bench)
    return bench.record


def test_other_bits_than_torchs_are_an_error(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(gpu, tmp_path, "bits")
    same = [Process(["x", "y", "z"]) for _ in range(3)]
    record = trained(gpu, monkeypatch, bench, "bits", *same, Process(["x", "y", "other"]))
    assert "lru/mapped has other bits than torch" in record.errors["net"]
    unlike = [result.spread.median for result in record.results]
    assert unlike == [0.0, 0.0, 0.0, 1.0]
    budgets = [options["budget"] for name, options in same[2].calls if name == "train"]
    assert budgets == [480 * MIB, 200 * MIB, 100 * MIB]


def test_the_report_joins_records_and_adds_lower_bounds(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="steps are recorded by torch")
    report, module = gpu("gpu.report"), gpu("gpu.record")
    ways = module.Record("ways", tmp_path / "ways.json", ABOUT, module.DONE)
    ways.details["link"] = {"in": 1e-3, "pinned in": 1e-3, "out": 1e-3, "pinned out": 5e-4}
    ways.leave_out("discards", "this driver cannot")
    bench = bench_of(gpu, tmp_path, "outofcore_resnet50_b128")
    bench = replace(bench, config=replace(bench.config, outofcore="resnet_smoke"))
    training = trained(gpu, monkeypatch, bench, "outofcore")
    assert training.errors == {}
    training.status, training.errors = module.FAILED, {"lru": "it | died"}
    data, text = report.write([ways, training], tmp_path, True)
    assert data.name == "gpu_some-gpu-80gb_2026-11-22.json"
    page = text.read_text()
    assert "| a | ways | ran | 0 |" in page
    assert "| c | outofcore_resnet50_b128 | failed: lru: it / died | 0 |" in page
    assert "| ways, discards | this driver cannot |" in page
    found = json.loads(data.read_text())["results"]
    figures = {result["name"]: result["spread"]["median"] for result in found}
    step = "resnet_smoke, auto/managed at 0.25 of the peak"
    assert figures[f"{step}: a step"] == 200.0
    assert figures[f"{step}: operators that followed a plan"] == 90.0
    assert 0 < figures[f"{step}: to the lower bound"] < 0.1  # at 1 MB/s each step takes long
    assert len(training.details["rows"]) == 2 + 4 * 3
    ways.about = {**ABOUT, "machine": {**ABOUT["machine"], "software": True}}
    assert "figures mean nothing" in report.write([ways], tmp_path, False)[1].read_text()


def test_the_published_networks_have_their_parameters(gpu: Any) -> None:
    torch = pytest.importorskip("torch", reason="the networks are torch's")
    nets = gpu("nets")
    with torch.device("meta"):
        resnet = nets.ResNet50(64, (3, 4, 6, 3), 1000)
        vgg = nets.VGG16(64, 224, 1000)
    assert sum(p.numel() for p in resnet.parameters()) == 25_557_032
    assert sum(p.numel() for p in vgg.parameters()) == 138_357_544
